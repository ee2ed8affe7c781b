//! `kvlane link` with NIXL.

use serde_json::Value;

use crate::process::Running;

fn measure(listen: &[&str], measure: &[&str]) -> Value {
    let listening = [
        &["link", "listen", "--bind", "127.0.0.1:0", "--once"],
        listen,
    ]
    .concat();
    let mut listener = Running::start(&listening, &[]);
    let address = listener.after("address=");
    let sizes = ["--sizes", "4K,1M,4M", "--rounds", "3", "--json"];
    let measuring = [&["link", address.as_str()], &sizes[..], measure].concat();
    let mut measurer = Running::start(&measuring, &[]);
    assert_eq!(measurer.wait(), Some(0), "{}", measurer.said());
    // UCX's exit handlers ran in both.
    assert_eq!(listener.wait(), Some(0), "{}", listener.said());
    let said = measurer.said();
    let json = &said[said.find("{\n").unwrap()..=said.rfind('}').unwrap()];
    serde_json::from_str(json).unwrap()
}

#[test]
fn two_processes_measure_with_nixl() {
    let measured = measure(&[], &[]);
    assert_eq!(measured["transport"], "nixl");
    // Three wholes, two in blocks, two and four streams.
    assert_eq!(measured["cells"].as_array().unwrap().len(), 7);
    assert!(measured["link_bytes_per_second"].as_f64().unwrap() > 1e6);
}

#[test]
fn a_side_without_nixl_is_measured_over_tcp() {
    for (listen, measuring) in [("tcp", "auto"), ("auto", "tcp")] {
        let measured = measure(&["--transport", listen], &["--transport", measuring]);
        assert_eq!(measured["transport"], "tcp");
    }
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    let listening = ["link", "listen", "--bind", "127.0.0.1:0", "--gpu", "63"];
    let mut listener = Running::start(&listening, &[]);
    assert_eq!(listener.wait(), Some(1));
    let said = listener.said();
    assert!(said.contains("CUDA") || said.contains("GPU 63"), "{said}");
}
