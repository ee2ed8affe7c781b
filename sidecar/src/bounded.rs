//! Files of others, read up to a length: a device or a log under a wrong name must not fill the memory.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Reads a file whole.
///
/// # Errors
/// It cannot be read, or is longer than `most_bytes`.
pub(crate) fn read(path: &Path, most_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // What its metadata says is not what a device or a growing file gives.
    let mut file = File::open(path)?.take(most_bytes.saturating_add(1));
    file.read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most_bytes {
        let message = format!("more than {most_bytes} bytes are not accepted");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// Reads a text file whole.
///
/// # Errors
/// Those of [`read`], and what is no UTF-8.
pub(crate) fn read_text(path: &Path, most_bytes: u64) -> io::Result<String> {
    String::from_utf8(read(path, most_bytes)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_bound() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        let error = read_text(&path, 4).unwrap_err().to_string();
        assert_eq!(error, "more than 4 bytes are not accepted");
        std::fs::write(&path, b"\xff").unwrap();
        assert!(read_text(&path, 5).is_err());
        assert!(read(&folder.path().join("none"), 5).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_device_without_end_is_refused() {
        let error = read(Path::new("/dev/zero"), 1 << 20).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }
}
