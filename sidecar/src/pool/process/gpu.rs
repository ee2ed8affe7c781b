//! The GPUs of this machine and their driver, through NVML, which is loaded when it is asked and need not be there.

use std::fmt;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Nvml, cuda_driver_version_major, cuda_driver_version_minor};
use serde::Serialize;

use super::proc;
use crate::config::CudaVersion;

/// What this machine has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Inventory {
    /// Version of the driver.
    pub(super) driver: String,
    /// Newest CUDA version that the driver serves.
    pub(super) cuda: Option<CudaVersion>,
    /// In the order of the bus.
    pub(super) gpus: Vec<Gpu>,
}

/// One card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Gpu {
    pub(super) index: u32,
    pub(super) uuid: String,
    pub(super) name: String,
    pub(super) memory_bytes: u64,
    pub(super) free_bytes: u64,
    /// Who computes on it.
    pub(super) users: Vec<User>,
}

/// A process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct User {
    pub(super) pid: u32,
    /// What it holds of the GPU's memory, where the driver tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes: Option<u64>,
    /// What its program is called. Its arguments, which may hold keys, are its owner's.
    pub(super) name: String,
}

impl Gpu {
    /// Tells whether a configuration that says this means this GPU.
    pub(super) fn is_called(&self, text: &str) -> bool {
        text.parse() == Ok(self.index) || (text.len() > 4 && self.uuid.starts_with(text))
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes >> 30;
        write!(
            f,
            "GPU {} ({}, {} of {} GiB free)",
            self.index,
            self.name,
            gib(self.free_bytes),
            gib(self.memory_bytes)
        )
    }
}

/// Asks the driver. This may take seconds where the driver's daemon does not run.
///
/// # Errors
/// Says in one line why nothing can be known.
pub(super) fn inventory() -> Result<Inventory, String> {
    let nvml = Nvml::builder()
        .lib_path(LIBRARY.as_ref())
        .init()
        .map_err(|error| match error {
            NvmlError::LibloadingError(_) => format!(
                "NVML ({LIBRARY}) cannot be loaded, so this machine's GPUs are not known: no NVIDIA driver is installed, or none is passed into this container"
            ),
            error => format!("NVML does not start: {error}"),
        })?;
    let failed = |what: &str, error: NvmlError| format!("NVML does not tell {what}: {error}");
    let driver = nvml.sys_driver_version();
    let count = nvml.device_count();
    let count = count.map_err(|error| failed("the number of GPUs", error))?;
    let cuda = nvml.sys_cuda_driver_version().ok().and_then(|version| {
        Some(CudaVersion {
            major: cuda_driver_version_major(version).try_into().ok()?,
            minor: cuda_driver_version_minor(version).try_into().ok()?,
        })
    });
    let gpus = (0..count).map(|index| {
        let gpu = describe(&nvml, index);
        gpu.map_err(|error| failed(&format!("about GPU {index}"), error))
    });
    Ok(Inventory {
        driver: driver.map_err(|error| failed("the driver's version", error))?,
        cuda,
        gpus: gpus.collect::<Result<_, _>>()?,
    })
}

/// The name under which drivers install it; the one without a number comes with development packages alone.
const LIBRARY: &str = "libnvidia-ml.so.1";

fn describe(nvml: &Nvml, index: u32) -> Result<Gpu, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let memory = device.memory_info()?;
    // Some virtual cards do not tell.
    let users = device.running_compute_processes().unwrap_or_default();
    let users = users.into_iter().map(|user| User {
        pid: user.pid,
        bytes: match user.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
        name: proc::name(user.pid),
    });
    Ok(Gpu {
        index,
        uuid: device.uuid()?,
        name: device.name()?,
        memory_bytes: memory.total,
        free_bytes: memory.free,
        users: users.collect(),
    })
}
