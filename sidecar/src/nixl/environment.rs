//! What must be in the environment before NIXL is loaded.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// The variable that says which transports UCX loads, and its value that leaves out InfiniBand's.
const VARIABLE: &str = "UCX_MODULES";
const WITHOUT_INFINIBAND: &str = "^ib";

/// Says that a process was already started again, so that it never happens twice.
const AGAIN: &str = "KVLANE_ENVIRONMENT_PREPARED";

/// Starts this program again, in the same process, with what NIXL needs in its environment; returns where nothing is needed.
///
/// UCX's InfiniBand module brings a library whose exit handler crashes on machines without such a device, after a run
/// without any error. The module is left out by a variable that is read when libraries load. A process cannot safely
/// change its own environment, so call this at the very start of `main`, where starting again costs nothing.
///
/// # Errors
/// The program cannot be started again.
pub fn prepare_environment() -> io::Result<()> {
    if !needed() || std::env::var_os(AGAIN).is_some() {
        return Ok(());
    }
    let mut arguments = std::env::args_os();
    let name = arguments.next();
    let mut again = Command::new(std::env::current_exe()?);
    if let Some(name) = name {
        again.arg0(name);
    }
    // `exec` returns only when it failed.
    Err(again
        .args(arguments)
        .env(VARIABLE, WITHOUT_INFINIBAND)
        .env(AGAIN, "1")
        .exec())
}

/// Refuses where this process would crash at its end.
pub(super) fn check() -> Result<(), String> {
    if needed() {
        return Err(format!(
            "there is no InfiniBand here, and UCX would crash at exit; {VARIABLE}={WITHOUT_INFINIBAND} must be set before the process starts"
        ));
    }
    Ok(())
}

fn needed() -> bool {
    let modules = std::env::var_os(VARIABLE);
    crashes(modules.as_deref(), Path::new("/sys/class/infiniband"))
}

fn crashes(modules: Option<&OsStr>, devices: &Path) -> bool {
    let some = std::fs::read_dir(devices).is_ok_and(|mut devices| devices.next().is_some());
    modules.is_none_or(OsStr::is_empty) && !some
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_needed_without_devices_unless_somebody_set_it() {
        let folder = tempfile::tempdir().unwrap();
        let devices = folder.path().join("infiniband");
        assert!(crashes(None, &devices));
        assert!(crashes(Some(OsStr::new("")), &devices));
        assert!(!crashes(Some(OsStr::new("cma")), &devices));
        std::fs::create_dir(&devices).unwrap();
        assert!(crashes(None, &devices));
        std::fs::create_dir(devices.join("mlx5_0")).unwrap();
        assert!(!crashes(None, &devices));
    }
}
