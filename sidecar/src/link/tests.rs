use clap::Parser;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

use super::args::{LinkArgs, Piece, Size};
use super::fit::{Fit, fit, median};
use super::listen::Listener;
use super::measure::measure;
use super::region::{pattern, pieces};
use super::*;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    link: LinkArgs,
}

fn args(text: &str) -> LinkArgs {
    let words = std::iter::once("link").chain(text.split_whitespace());
    Command::try_parse_from(words).unwrap().link
}

/// Starts a listener; returns its address and what ends it.
async fn listener(flags: &str) -> (String, CancellationToken) {
    let args = args(&format!(
        "listen --bind 127.0.0.1:0 --transport tcp {flags}"
    ));
    let listener = Listener::bind(&args).await.unwrap();
    let address = listener.address().to_string();
    let cancel = CancellationToken::new();
    TaskTracker::new().spawn(listener.serve(cancel.clone()));
    (address, cancel)
}

#[tokio::test]
async fn a_link_is_measured_over_tcp_and_its_lines_are_a_configuration() {
    let (address, cancel) = listener("").await;
    let flags = "--transport tcp --sizes 4K,1M,2M --pieces whole,64K --streams 1,3 --rounds 3";
    let measured = measure(&args(&format!("{address} {flags}"))).await.unwrap();
    // Three wholes, two in blocks (4K is one block), and three streams of 2M.
    let cells: Vec<_> = measured
        .cells
        .iter()
        .map(|cell| (cell.bytes, cell.streams))
        .collect();
    let (k, m) = (1 << 10, 1 << 20);
    assert_eq!(
        cells,
        [
            (4 * k, 1),
            (m, 1),
            (2 * m, 1),
            (m, 1),
            (2 * m, 1),
            (2 * m, 3)
        ]
    );
    assert!(measured.cells.iter().all(|cell| cell.seconds > 0.0));
    assert_eq!(measured.transport, "tcp");
    assert!(
        measured
            .table()
            .contains("\nhandoff:\n  link_bytes_per_second: ")
    );
    let json = measured.json();
    let speed = json["link_bytes_per_second"].as_f64().unwrap();
    assert!(speed > 1e5, "{json}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("link.yaml");
    std::fs::write(&file, measured.file()).unwrap();
    let yaml = format!(
        "handoff: {{kv_bytes_per_token: 64, link_file: '{}'}}",
        file.display()
    );
    let config = crate::config::Config::from_yaml(&yaml, "test").unwrap();
    let (planner, _, _) = config.handoff.unwrap().planner().unwrap();
    let seeded = planner.stats().links[0].bytes_per_second.unwrap();
    assert!((seeded / speed - 1.0).abs() < 1e-3, "{seeded} {speed}");
    cancel.cancel();
}

#[tokio::test]
async fn a_listener_refuses_what_is_foreign_or_too_large() {
    let (address, cancel) = listener("--max-size 1M").await;
    let asks = |flags: &str| args(&format!("{address} --transport tcp --rounds 1 {flags}"));
    let error = measure(&asks("--sizes 2M")).await.unwrap_err().to_string();
    assert!(error.contains("up to 1048576 are accepted"), "{error}");
    // Garbage, and a frame that promises more than there may be.
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[255; 64]] {
        let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
        stream.write_all(garbage).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.is_empty());
    }
    // It serves on.
    let measured = measure(&asks("--sizes 64K --streams 1")).await.unwrap();
    assert!(!measured.cells.is_empty());
    cancel.cancel();
}

/// Answers whoever connects with these bytes, and then keeps silent.
async fn foreign(answer: Vec<u8>) -> String {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap().to_string();
    TaskTracker::new().spawn(async move {
        let (mut stream, _) = socket.accept().await.unwrap();
        stream.write_all(&answer).await.unwrap();
        std::future::pending::<()>().await;
    });
    address
}

fn frame(json: &str) -> Vec<u8> {
    let length = u32::try_from(json.len()).unwrap();
    [&length.to_le_bytes()[..], json.as_bytes()].concat()
}

#[tokio::test]
async fn a_foreign_peer_is_an_error_and_no_hang() {
    let other = frame(r#"{"protocol": "kvlane-link", "version": 9}"#);
    for (answer, part) in [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            "at most 65536 are accepted",
        ),
        (frame("not json"), "not understood"),
        (other, "version 9; \"kvlane-link\" version 1 is accepted"),
    ] {
        let address = foreign(answer).await;
        let args = args(&format!("{address} --transport tcp"));
        let error = measure(&args).await.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let nobody = args("127.0.0.1:1 --transport tcp");
    let error = measure(&nobody).await.unwrap_err().to_string();
    assert!(error.contains("127.0.0.1:1"), "{error}");
}

#[tokio::test]
async fn a_silent_peer_is_given_up() {
    let address = foreign(Vec::new()).await;
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let limit = std::time::Duration::from_millis(50);
    let heard = wire::hear::<wire::Welcome>(&mut stream, limit).await;
    let error = heard.unwrap_err().to_string();
    assert!(error.contains("did not answer in time"), "{error}");
}

#[test]
fn a_line_is_found_through_a_stalled_transfer() {
    // 1 GB/s and 2 ms, and one that stalled.
    let line = |megabytes: f64| (megabytes * 1e6, megabytes * 1e-3 + 2e-3);
    let mut points: Vec<_> = [2.0, 4.0, 8.0, 16.0, 32.0, 64.0].map(line).to_vec();
    points.push((10e6, 5.0));
    let Fit {
        bytes_per_second,
        fixed_seconds,
    } = fit(&points).unwrap();
    assert!(
        (bytes_per_second / 1e9 - 1.0).abs() < 0.01,
        "{bytes_per_second}"
    );
    assert!((fixed_seconds / 2e-3 - 1.0).abs() < 0.01, "{fixed_seconds}");
    // One size alone tells the throughput.
    let one = fit(&[(4e6, 4e-3)]).unwrap();
    assert!((one.bytes_per_second - 1e9).abs() < 1.0);
    assert!(one.fixed_seconds.abs() < 1e-9);
    assert_eq!(fit(&[]), None);
    assert_eq!(fit(&[(1e6, 0.0)]), None);
    assert_eq!(median(vec![4.0, 1.0, f64::NAN, 2.0, 3.0]), Some(2.5));
}

#[test]
fn pieces_cover_a_transfer_and_no_two_in_a_row_are_neighbours() {
    for (bytes, piece) in [(1000, 64), (1024, 64), (64, 64), (10, 64)] {
        let mut parts = pieces(100, bytes, piece);
        for pair in parts.windows(2) {
            assert_ne!(pair[0].0 + pair[0].1, pair[1].0);
        }
        parts.sort_unstable();
        let end = parts.iter().fold(100, |at, (offset, length)| {
            assert_eq!(at, *offset);
            at + length
        });
        assert_eq!(end, 100 + bytes);
    }
    assert_eq!(pattern(8, 12)[..8], pattern(0, 16)[8..]);
}

#[test]
fn sizes_are_read_and_refused() {
    for (text, bytes) in [("4K", 4096), ("1M", 1 << 20), ("2G", 2 << 30), ("12", 12)] {
        let size: Size = text.parse().unwrap();
        assert_eq!((size.bytes(), size.to_string()), (bytes, text.to_owned()));
    }
    for text in ["", "0", "-1", "1T", "129G", "99999999999999999999G", "K"] {
        let error = text.parse::<Size>().unwrap_err();
        assert!(error.contains("1 to 128G"), "{error}");
    }
    let blocks = Piece::Blocks("64K".parse().unwrap());
    assert_eq!("64K".parse::<Piece>().unwrap(), blocks);
    assert_eq!((blocks.of(1 << 20), blocks.of(1000)), (64 << 10, 1000));
    assert_eq!("whole".parse::<Piece>().unwrap().of(1000), 1000);
    assert!("16".parse::<Piece>().unwrap_err().contains("512"));
}
