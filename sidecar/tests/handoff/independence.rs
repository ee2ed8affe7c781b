//! Who depends on whom. The driver serves whoever asks, so it knows of no proxy.

use std::fs;
use std::path::Path;

/// Checks every source below a folder.
fn none_names(folder: &str, forbidden: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src")
        .join(folder);
    let mut folders = vec![root];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            files += 1;
            let text = fs::read_to_string(&path).unwrap();
            for name in forbidden {
                assert!(!text.contains(name), "{} names {name}", path.display());
            }
        }
    }
    assert!(files > 3, "{folder} has {files} files");
}

#[test]
fn the_driver_and_what_it_forwards_with_know_of_no_proxy() {
    let above = ["crate::proxy", "crate::app", "crate::serve", "crate::admin"];
    none_names("handoff", &above);
    none_names("forward", &[&above[..], &["crate::handoff"]].concat());
}
