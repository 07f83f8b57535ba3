//! NVIDIA GPUs: finding them, and our kernels, which `build.rs` compiles and this module embeds and loads.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, DriverError, result, sys,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::{CudaDevice, Device};

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
    Ok(Device::new_cuda_with_stream(number)?)
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
            .ok_or_else(|| Error::invalid(&place, "is not part of this binary"))?;
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
