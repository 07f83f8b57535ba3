#!/usr/bin/env python3
"""Static libraries that stand in for CUDA's at link time: each function opens the real library at its first call.

    scripts/cuda-shims.py CUDARC_CRATE OUT_DIR

The functions are those that CUDARC_CRATE binds. Where the real library or the function is missing, a call returns that
library's own "not initialised" code. x86-64 ELF; needs gcc and ar. Set OSCAR_CUDA_DIR to look in a folder first.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

# library: (module of cudarc, files to open in order, code returned when there is none)
LIBRARIES = {
    "cuda": ("driver", ["libcuda.so.1", "libcuda.so"], 100),
    "nvrtc": ("nvrtc", ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"], 11),
    "curand": ("curand", ["libcurand.so.10", "libcurand.so"], 101),
    "cublas": ("cublas", ["libcublas.so.13", "libcublas.so.12", "libcublas.so"], 1),
    "cublasLt": ("cublaslt", ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"], 1),
}
FOLDERS = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/usr/local/nvidia/lib64"]

# An unresolved slot leads here with the function's index pushed: keep every argument register, resolve, jump on.
TRAMPOLINE = """
    .text
shim_{lib}_resolve_and_jump:
    push %rdi; push %rsi; push %rdx; push %rcx; push %r8; push %r9; push %rax
    sub $136, %rsp
{save}
    mov 192(%rsp), %edi
    call shim_{lib}_resolve
    mov %rax, %r11
{restore}
    add $136, %rsp
    pop %rax; pop %r9; pop %r8; pop %rcx; pop %rdx; pop %rsi; pop %rdi
    add $8, %rsp
    jmp *%r11
"""
RESOLVE = """
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
extern void *shim_{lib}_slots[];
extern const char *const shim_{lib}_names[];
static int missing(void) {{ return {code}; }}
static const char *const files[] = {{ {files}, 0 }};
static const char *const folders[] = {{ {folders}, 0 }};
static void *in_folder(const char *folder, const char *file) {{
    char path[4096];
    if (!folder || snprintf(path, sizeof path, "%s/%s", folder, file) >= (int)sizeof path) return 0;
    return dlopen(path, RTLD_NOW | RTLD_GLOBAL);
}}
static void *open_library(void) {{
    void *found;
    for (int i = 0; files[i]; i++) {{
        if ((found = in_folder(getenv("OSCAR_CUDA_DIR"), files[i]))) return found;
        if ((found = dlopen(files[i], RTLD_NOW | RTLD_GLOBAL))) return found;
        for (int j = 0; folders[j]; j++)
            if ((found = in_folder(folders[j], files[i]))) return found;
    }}
    return 0;
}}
__attribute__((visibility("hidden"))) void *shim_{lib}_resolve(unsigned i) {{
    static void *library;
    void *function = 0;
    void *handle = __atomic_load_n(&library, __ATOMIC_ACQUIRE);
    if (!handle && (handle = open_library())) __atomic_store_n(&library, handle, __ATOMIC_RELEASE);
    if (handle) function = dlsym(handle, shim_{lib}_names[i]);
    if (!function) function = (void *)missing;
    __atomic_store_n(&shim_{lib}_slots[i], function, __ATOMIC_RELEASE);
    return function;
}}
"""
FUNCTION = """
    .globl {name}
    .type {name}, @function
{name}:
    jmp *(shim_{lib}_slots+{offset})(%rip)
1:  pushq ${index}
    jmp shim_{lib}_resolve_and_jump
    .size {name}, .-{name}
    .pushsection .data.rel.{lib}_slots, "aw"
    .quad 1b
    .popsection
    .pushsection .data.rel.ro.{lib}_names, "aw"
    .quad 2f
    .popsection
    .pushsection .rodata.{lib}, "a"
2:  .asciz "{name}"
    .popsection
"""
TABLES = """
    .section .data.rel.{lib}_slots, "aw"
    .balign 8
    .globl shim_{lib}_slots
    .hidden shim_{lib}_slots, shim_{lib}_names, shim_{lib}_resolve
shim_{lib}_slots:
    .section .data.rel.ro.{lib}_names, "aw"
    .balign 8
    .globl shim_{lib}_names
shim_{lib}_names:
"""


def bound_functions(source: str) -> list[str]:
    blocks = re.findall(r'extern "C" \{(.*?)\n\s*\}', source, re.S)
    return sorted({name for block in blocks for name in re.findall(r"\bfn (\w+)\(", block)})


def build(lib: str, names: list[str], files: list[str], code: int, out: pathlib.Path) -> None:
    moves = [(f"%xmm{i}", f"{16 * i}(%rsp)") for i in range(8)]
    assembly = TABLES.format(lib=lib) + TRAMPOLINE.format(
        lib=lib,
        save="\n".join(f"    movups {register}, {slot}" for register, slot in moves),
        restore="\n".join(f"    movups {slot}, {register}" for register, slot in moves),
    )
    for index, name in enumerate(names):
        assembly += FUNCTION.format(lib=lib, name=name, index=index, offset=8 * index)
    assembly += '\n    .section .note.GNU-stack,"",@progbits\n'
    quoted = lambda values: ", ".join(f'"{value}"' for value in values)
    resolve = RESOLVE.format(lib=lib, code=code, files=quoted(files), folders=quoted(FOLDERS))
    with tempfile.TemporaryDirectory(dir=out) as folder:
        objects = []
        for file, text in ((f"{lib}.S", assembly), (f"{lib}.c", resolve)):
            source = pathlib.Path(folder, file)
            source.write_text(text)
            objects.append(f"{source}.o")
            subprocess.run(["gcc", "-O2", "-fPIC", "-c", source, "-o", objects[-1]], check=True)
        archive = pathlib.Path(folder, "archive.a")
        subprocess.run(["ar", "crs", archive, *objects], check=True)
        archive.replace(out / f"lib{lib}.a")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    crate, out = map(pathlib.Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    for lib, (module, files, code) in LIBRARIES.items():
        names = bound_functions((crate / "src" / module / "sys" / "mod.rs").read_text())
        if not names:
            sys.exit(f"{crate}: found no functions of {lib}; has cudarc's layout changed?")
        build(lib, names, files, code, out)


main()
