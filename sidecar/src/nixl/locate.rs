//! Where `libnixl_capi.so` may lie.

use std::path::{Path, PathBuf};

/// The variable that names the file.
const VARIABLE: &str = "NIXL_CAPI_LIB";
const FILE: &str = "libnixl_capi.so";

/// Folders of NIXL's own installers.
const INSTALLED: [&str; 3] = [
    "/opt/nvidia/nvda_nixl/lib/x86_64-linux-gnu",
    "/opt/nvidia/nvda_nixl/lib/aarch64-linux-gnu",
    "/usr/local/nixl/lib/x86_64-linux-gnu",
];
/// Folders of wheels below `site-packages`.
const WHEELS: [&str; 2] = [".nixl_cu13.mesonpy.libs", ".nixl_cu12.mesonpy.libs"];

/// Returns the file to load. One that was asked for is taken or refused, never replaced.
pub(super) fn find(setting: Option<&Path>) -> Result<PathBuf, String> {
    let variable = std::env::var_os(VARIABLE).map(PathBuf::from);
    if let Some(asked) = setting.map(Path::to_path_buf).or(variable) {
        let file = if asked.is_dir() {
            asked.join(FILE)
        } else {
            asked
        };
        return std::path::absolute(&file)
            .ok()
            .filter(|file| file.is_file())
            .ok_or_else(|| format!("there is no file {}", file.display()));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let prefixes = std::env::split_paths(&path).filter_map(|folder| prefix_of_python(&folder));
    let wheels = prefixes
        .flat_map(|prefix| site_packages(&prefix))
        .flat_map(|site| WHEELS.map(|wheel| site.join(wheel)));
    INSTALLED
        .iter()
        .map(PathBuf::from)
        .chain(wheels)
        .map(|folder| folder.join(FILE))
        .find(|file| file.is_file())
        .ok_or_else(|| {
            format!(
                "{FILE} was not found; install it with `pip install --no-deps nixl-cu12`, or name the file in {VARIABLE}"
            )
        })
}

/// Returns the folder above `bin` where a Python is in it.
fn prefix_of_python(bin: &Path) -> Option<PathBuf> {
    (bin.is_absolute() && bin.join("python3").is_file())
        .then(|| bin.parent().map(Path::to_path_buf))?
}

fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(prefix.join("lib"));
    let mut pythons: Vec<PathBuf> = folders
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| entry.path())
        .collect();
    pythons.sort();
    pythons
        .iter()
        .flat_map(|python| ["site-packages", "dist-packages"].map(|name| python.join(name)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_asked_for_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        let error = find(Some(&file)).unwrap_err();
        assert!(error.contains(&*file.to_string_lossy()), "{error}");
        std::fs::write(&file, "").unwrap();
        assert_eq!(find(Some(&file)).unwrap(), file);
        // Or the folder that it is in.
        assert_eq!(find(Some(folder.path())).unwrap(), file);
    }

    #[test]
    fn a_wheel_beside_a_python_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        assert_eq!(prefix_of_python(&bin), None);
        std::fs::write(bin.join("python3"), "").unwrap();
        let prefix = prefix_of_python(&bin).unwrap();
        let site = prefix.join("lib/python3.12/site-packages");
        std::fs::create_dir_all(&site).unwrap();
        assert!(site_packages(&prefix).contains(&site));
    }
}
