//! Where to compute: the CPU, or an NVIDIA GPU where the feature `cuda` is built in.

use std::fmt;
use std::str::FromStr;

use candle_core::{Device, Shape, Tensor, WithDType};
use serde::Serialize;

use crate::Result;

/// What `--device` says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU, or the CPU where there is none.
    #[default]
    Auto,
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("cuda:").map(str::parse)) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            (_, Some(Ok(number))) => Ok(Self::Cuda(number)),
            _ => Err("a device is `auto`, `cpu` or `cuda:N`, such as `cuda:0`".into()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl DeviceChoice {
    /// # Errors
    /// Where the GPU asked for is not there, its driver is too old, or this build knows no GPUs.
    pub fn open(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Auto if gpu::count() == 0 => Ok(Device::Cpu),
            Self::Auto => gpu::open(0),
            Self::Cuda(number) => gpu::open(number),
        }
    }
}

/// `values` as a tensor on `device`. On a GPU the copy runs beside what is queued there.
///
/// # Errors
/// Where `shape` holds another number of values, or the device has no memory left.
pub(crate) fn upload<T: WithDType + bytemuck::NoUninit>(
    values: Vec<T>,
    shape: impl Into<Shape>,
    device: &Device,
) -> Result<Tensor> {
    let shape = shape.into();
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device
        && shape.elem_count() == values.len()
    {
        return crate::cuda::upload(bytemuck::cast_slice(&values), T::DTYPE, shape, device);
    }
    Ok(Tensor::from_vec(values, shape, device)?)
}

/// The most bytes that this process's tensors took on a GPU since [`reset_peak_memory`]; none on the CPU.
///
/// # Errors
/// Where the driver refuses to tell.
pub fn peak_memory(device: &Device) -> Result<Option<u64>> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return crate::cuda::peak_memory(device).map(Some);
    }
    debug_assert!(!device.is_cuda());
    Ok(None)
}

/// Gives a GPU's unused memory back and counts [`peak_memory`] from here.
///
/// # Errors
/// Where the driver refuses.
pub fn reset_peak_memory(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return crate::cuda::reset_peak_memory(device);
    }
    debug_assert!(!device.is_cuda());
    Ok(())
}

/// One row of `oscar devices`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceInfo {
    /// As `--device` takes it.
    pub device: String,
    /// What it is called by its maker.
    pub name: String,
    pub memory_bytes: Option<u64>,
    pub free_bytes: Option<u64>,
    /// Such as `9.0`; none for the CPU.
    pub compute_capability: Option<String>,
}

/// All devices that `--device` can name: the CPU, then the GPUs.
///
/// # Errors
/// Where a GPU's driver refuses to tell.
pub fn list() -> Result<Vec<DeviceInfo>> {
    let mut devices = vec![cpu()];
    for number in 0..gpu::count() {
        devices.push(gpu::info(number)?);
    }
    Ok(devices)
}

/// Why [`list`] names no GPU, where it does not.
pub fn why_no_gpu() -> Option<&'static str> {
    if !cfg!(feature = "cuda") {
        return Some("this `oscar` was built without the feature `cuda`");
    }
    (gpu::count() == 0).then_some("no NVIDIA GPU and driver were found")
}

fn cpu() -> DeviceInfo {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let value = |text: &str, key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let memory = read("/proc/meminfo");
    let bytes = |key| {
        let kib = value(&memory, key)?
            .split_whitespace()
            .next()?
            .parse::<u64>();
        Some(kib.ok()? << 10)
    };
    let name = value(&read("/proc/cpuinfo"), "model name");
    DeviceInfo {
        device: DeviceChoice::Cpu.to_string(),
        name: name.unwrap_or_else(|| std::env::consts::ARCH.into()),
        memory_bytes: bytes("MemTotal"),
        free_bytes: bytes("MemAvailable"),
        compute_capability: None,
    }
}

#[cfg(feature = "cuda")]
mod gpu {
    pub use crate::cuda::{count, info, open};
}

#[cfg(not(feature = "cuda"))]
mod gpu {
    use super::{Device, DeviceInfo, Result};
    use crate::Error;

    pub fn count() -> usize {
        0
    }

    pub fn open(number: usize) -> Result<Device> {
        Err(Error::invalid(
            format!("--device cuda:{number}"),
            "this `oscar` was built without the feature `cuda`",
        )
        .hint("build it with `cargo build --release --features cuda`, or use `--device cpu`"))
    }

    pub fn info(number: usize) -> Result<DeviceInfo> {
        Err(open(number).err().unwrap_or(Error::Interrupted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_they_are_printed() {
        for (text, device) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda:3", DeviceChoice::Cuda(3)),
        ] {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_cpu_is_always_there() {
        let devices = list().unwrap();
        assert_eq!(devices[0].device, "cpu");
        assert!(devices[0].memory_bytes > Some(1 << 20));
        assert!(matches!(DeviceChoice::Cpu.open(), Ok(Device::Cpu)));
    }

    #[test]
    fn a_gpu_that_is_not_there_is_refused_by_name() {
        let message = DeviceChoice::Cuda(97)
            .open()
            .map(|_| ())
            .unwrap_err()
            .to_string();
        assert!(message.starts_with("--device cuda:97: "), "{message}");
        assert!(message.contains("hint"), "{message}");
    }
}
