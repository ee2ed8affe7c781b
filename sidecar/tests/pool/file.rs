//! Workers from a watched file.

use std::path::Path;

use crate::setup::{admin, engine, eventually, ids, metrics, sidecar, until_state, worker};

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
}

#[tokio::test]
async fn a_file_may_change_break_go_and_come_back() {
    let (one, two) = (engine(1.0).await, engine(1.0).await);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("workers.yaml");
    let handle = sidecar(|config| {
        config.discovery.file = Some(path.clone());
        config.discovery.file_interval_seconds = 0.05;
        config.drain_seconds = 0.5;
    })
    .await;
    let problem = || {
        let report = handle.app().pool.report();
        let source = report
            .sources
            .into_iter()
            .find(|source| &*source.name == "file");
        source.unwrap().error
    };
    eventually("a missing file is named", || {
        problem().is_some_and(|problem| problem.contains("workers.yaml: No such file"))
    })
    .await;

    let entry =
        |id: &str, url: String, role: &str| format!("- {{id: {id}, url: '{url}', role: {role}}}\n");
    write(&path, &entry("a", one.url(), "both"));
    until_state(&handle, "a", "ready").await;
    assert_eq!(problem(), None);
    let first = worker(&handle, "a").await;
    assert_eq!(first["source"], "file");

    // Renamed over, as editors do; the first worker keeps its life.
    let next = folder.path().join("next");
    write(
        &next,
        &(entry("a", one.url(), "prefill") + &entry("b", two.url(), "decode")),
    );
    std::fs::rename(&next, &path).unwrap();
    until_state(&handle, "b", "ready").await;
    let second = worker(&handle, "a").await;
    assert_eq!(
        (&second["epoch"], &second["role"]),
        (&first["epoch"], &"prefill".into())
    );

    for (broken, word) in [("- {id: a}\n", "[0].url"), ("", "empty"), ("- [", "line")] {
        write(&path, broken);
        eventually("a broken file is named", || {
            problem().is_some_and(|problem| problem.contains(word))
        })
        .await;
        assert_eq!(ids(&handle), ["a", "b"], "the last good list stays");
    }
    let pool = admin(&handle, "GET", "/v1/pool", "").await.json();
    let file = pool["sources"]
        .as_array()
        .unwrap()
        .iter()
        .find(|of| of["name"] == "file");
    assert!(
        file.unwrap()["error"]
            .as_str()
            .unwrap()
            .contains("workers.yaml")
    );
    let text = metrics(&handle).await;
    assert!(
        text.contains("kvlane_pool_source_failing{source=\"file\"} 1"),
        "{text}"
    );

    write(&path, &entry("b", two.url(), "decode"));
    eventually("only b", || ids(&handle) == ["b"]).await;
    std::fs::remove_file(&path).unwrap();
    eventually("a missing file is named", || problem().is_some()).await;
    assert_eq!(ids(&handle), ["b"]);
    write(&path, &entry("a", two.url(), "both"));
    eventually("only a, at its new address", || ids(&handle) == ["a"]).await;
    assert_eq!(worker(&handle, "a").await["url"], two.url());
    assert_eq!(problem(), None);
}

/// A mounted `ConfigMap`: the file is a link through a link to a folder, and only the inner link is replaced.
#[tokio::test]
async fn a_mounted_config_map_is_followed_through_its_links() {
    use std::os::unix::fs::symlink;
    let engine = engine(1.0).await;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (version, id) in [("..1", "a"), ("..2", "b")] {
        std::fs::create_dir(at(version)).unwrap();
        let text = format!(r#"[{{"id": "{id}", "url": "{}"}}]"#, engine.url());
        write(&at(version).join("workers.json"), &text);
    }
    symlink("..1", at("..data")).unwrap();
    symlink("..data/workers.json", at("workers.json")).unwrap();
    let handle = sidecar(|config| {
        config.discovery.file = Some(at("workers.json"));
        config.discovery.file_interval_seconds = 0.05;
    })
    .await;
    until_state(&handle, "a", "ready").await;
    symlink("..2", at("..next")).unwrap();
    std::fs::rename(at("..next"), at("..data")).unwrap();
    eventually("the other version", || ids(&handle) == ["b"]).await;
}
