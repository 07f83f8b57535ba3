//! NVIDIA GPUs: finding them, and our kernels, which `build.rs` compiles and this module embeds and loads.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, DriverError, result, sys,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Shape, Storage, Tensor};

use crate::device::{DeviceChoice, DeviceInfo};
use crate::{Error, Result};

/// `KERNELS`: (stem of the source, fat binary); `TOOLKIT`: CUDA's version at build time, such as 13000.
mod embedded {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

/// GPUs that the driver shows; 0 without a driver.
pub fn count() -> usize {
    static COUNT: LazyLock<usize> = LazyLock::new(|| {
        let count = result::init().and_then(|()| CudaContext::device_count());
        count.map_or(0, |n| usize::try_from(n).unwrap_or(0))
    });
    *COUNT
}

/// # Errors
/// Where there is no GPU of this number, or the driver is older than the toolkit that built this binary.
pub fn open(number: usize) -> Result<Device> {
    let flag = format!("--device {}", DeviceChoice::Cuda(number));
    let there = count();
    if there == 0 {
        return Err(Error::invalid(flag, "no NVIDIA GPU and driver were found")
            .hint("see `oscar devices`, or use `--device cpu`"));
    }
    if number >= there {
        let problem = format!("there is no such GPU; the last one is cuda:{}", there - 1);
        return Err(Error::invalid(flag, problem).hint("see `oscar devices`"));
    }
    let driver = driver_version().map_err(|e| refused(&flag, e))?;
    if driver / 1000 < embedded::TOOLKIT / 1000 {
        let version = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
        return Err(Error::invalid(
            flag,
            format!(
                "the driver knows CUDA up to {}, and this `oscar` was built with {}",
                version(driver),
                version(embedded::TOOLKIT)
            ),
        )
        .hint("update the driver, or build with an older toolkit"));
    }
    let device = Device::new_cuda_with_stream(number)?;
    if let Device::Cuda(device) = &device {
        keep_freed_memory(device).map_err(|e| refused(&flag, e))?;
        // SAFETY: all work goes through the device's one stream; `upload`, which has its own, waits for it.
        unsafe { device.cuda_stream().context().disable_event_tracking() };
    }
    Ok(device)
}

/// The pool that every tensor's memory comes from.
fn pool(device: &CudaDevice) -> Result<sys::CUmemoryPool, DriverError> {
    let number = device.cuda_stream().context().cu_device();
    // SAFETY: the number of a device that is open.
    unsafe { result::device::get_default_mem_pool(number) }
}

/// By default freed memory goes back to the system whenever the host waits for the GPU, and is mapped anew by the next
/// step: milliseconds for each tensor.
fn keep_freed_memory(device: &CudaDevice) -> Result<(), DriverError> {
    let mut most = u64::MAX;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the driver reads a u64 for this attribute.
    unsafe { result::mem_pool::set_attribute(pool(device)?, attribute, (&raw mut most).cast()) }
}

/// The most bytes of this process's tensors on `device` since [`reset_peak_memory`], with what lay unused between them.
///
/// # Errors
/// Where the driver refuses to tell.
pub fn peak_memory(device: &CudaDevice) -> Result<u64> {
    let tell = || {
        let mut peak = 0u64;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
        let to = (&raw mut peak).cast();
        // SAFETY: the driver writes a u64 for this attribute.
        unsafe { result::mem_pool::get_attribute(pool(device)?, attribute, to) }?;
        Ok(peak)
    };
    tell().map_err(|e| refused("peak memory", e))
}

/// Gives unused memory back and lets [`peak_memory`] count from here.
///
/// # Errors
/// Where the driver refuses.
pub fn reset_peak_memory(device: &CudaDevice) -> Result<()> {
    device.synchronize()?;
    let reset = || {
        let mut zero = 0u64;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
        // SAFETY: the pool is the device's own; the driver reads a u64 for this attribute, which must be 0.
        unsafe {
            result::mem_pool::trim_to(pool(device)?, 0)?;
            result::mem_pool::set_attribute(pool(device)?, attribute, (&raw mut zero).cast())
        }
    };
    reset().map_err(|e| refused("peak memory", e))
}

/// A tensor of `bytes`, copied on a stream of its own: beside what is queued on `device`, and done when this returns.
///
/// # Errors
/// Where the GPU has no memory left, or `dtype` is none of f32, bf16 and f16.
pub fn upload(bytes: &[u8], dtype: DType, shape: Shape, device: &CudaDevice) -> Result<Tensor> {
    let copy = || -> Result<sys::CUdeviceptr, DriverError> {
        let stream = upload_stream(device)?;
        // SAFETY: the copy writes all of it before anything can read it.
        let mut target = unsafe { stream.alloc::<u8>(bytes.len()) }?;
        stream.memcpy_htod(bytes, &mut target)?;
        stream.synchronize()?;
        Ok(target.leak())
    };
    let place = format!("a copy of {} bytes to the GPU", bytes.len());
    let pointer = copy().map_err(|e| refused(&place, e))?;
    let stream = device.cuda_stream();
    // From here on the memory belongs to the device's stream, which frees it after its last reader.
    macro_rules! storage {
        ($number:ty) => {{
            let len = bytes.len() / size_of::<$number>();
            // SAFETY: the pointer owns `len` numbers, which the copy above wrote.
            let slice = unsafe { stream.upgrade_device_ptr::<$number>(pointer, len) };
            CudaStorage::wrap_cuda_slice(slice, device.clone())
        }};
    }
    let storage = match dtype {
        DType::F32 => storage!(f32),
        DType::BF16 => storage!(half::bf16),
        DType::F16 => storage!(half::f16),
        other => {
            drop(storage!(u8));
            return Err(Error::invalid(place, format!("of {}", other.as_str())));
        }
    };
    let (storage, none) = (Storage::Cuda(storage), BackpropOp::none());
    Ok(Tensor::from_storage(storage, shape, none, false))
}

fn upload_stream(device: &CudaDevice) -> Result<Arc<CudaStream>, DriverError> {
    static STREAMS: LazyLock<Mutex<HashMap<usize, Arc<CudaStream>>>> =
        LazyLock::new(Mutex::default);
    let stream = device.cuda_stream();
    let context = stream.context();
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(stream) = streams.get(&context.ordinal()) {
        return Ok(stream.clone());
    }
    let stream = context.new_stream()?;
    streams.insert(context.ordinal(), stream.clone());
    Ok(stream)
}

/// # Errors
/// Where the driver refuses to tell.
pub fn info(number: usize) -> Result<DeviceInfo> {
    let device = DeviceChoice::Cuda(number).to_string();
    let tell = || -> Result<DeviceInfo, DriverError> {
        let context = CudaContext::new(number)?;
        let (free, total) = context.mem_get_info()?;
        let (major, minor) = context.compute_capability()?;
        Ok(DeviceInfo {
            device: device.clone(),
            name: context.name()?,
            memory_bytes: Some(total as u64),
            free_bytes: Some(free as u64),
            compute_capability: Some(format!("{major}.{minor}")),
        })
    };
    tell().map_err(|e| refused(&device, e))
}

fn driver_version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: the driver writes one int where it is pointed to.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    Ok(version)
}

pub(crate) fn refused(place: &str, error: DriverError) -> Error {
    Error::invalid(place, format!("the driver refused: {error}"))
}

/// Such as 90 for 9.0.
///
/// # Errors
/// Where the driver refuses to tell.
pub fn compute_capability(device: &CudaDevice) -> Result<i32> {
    let (major, minor) = device
        .cuda_stream()
        .context()
        .compute_capability()
        .map_err(|e| refused("compute capability", e))?;
    Ok(10 * major + minor)
}

/// The kernel `name` of `kernels/<module>.cu`, on `device`.
///
/// # Errors
/// Where the GPU cannot run what this binary holds of it, which [`Error::hint`]s at the capability to build for.
pub fn function(device: &CudaDevice, module: &str, name: &str) -> Result<CudaFunction> {
    type Loaded = HashMap<(usize, String), Arc<CudaModule>>;
    static LOADED: LazyLock<Mutex<Loaded>> = LazyLock::new(Mutex::default);
    let stream = device.cuda_stream();
    let context = stream.context();
    let place = format!("kernel `{module}`");
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (context.ordinal(), module.to_owned());
    let module = if let Some(module) = loaded.get(&key) {
        module.clone()
    } else {
        let (_, binary) = embedded::KERNELS
            .iter()
            .find(|(stem, _)| *stem == module)
            .ok_or_else(|| Error::invalid(&place, "is not among `KERNELS` of `build.rs`"))?;
        let module = context
            .load_module(Ptx::from_binary(binary.to_vec()))
            .map_err(|e| {
                refused(&place, e)
                    .hint("build with `CUDA_COMPUTE_CAP` of this GPU, see `oscar devices`")
            })?;
        loaded.insert(key, module.clone());
        module
    };
    module
        .load_function(name)
        .map_err(|e| refused(&format!("{place}, function `{name}`"), e))
}

/// Lets blocks of `kernel` have all the shared memory that a block can have, and says how much that is, in bytes. Not
/// less: objects of different shapes share a kernel, and the last one's limit would be that of all.
///
/// # Errors
/// Where the driver refuses.
pub(crate) fn allow_shared_memory(device: &CudaDevice, kernel: &CudaFunction) -> Result<usize> {
    let refused = |e| refused("shared memory", e);
    let bytes = device
        .cuda_stream()
        .context()
        .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        .map_err(refused)?;
    kernel
        .set_attribute(
            sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            bytes,
        )
        .map_err(refused)?;
    Ok(bytes as usize)
}
