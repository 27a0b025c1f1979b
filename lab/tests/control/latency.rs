//! Response times of commands while memory is sent at full speed.

use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use towline_lab::expect::number;
use towline_lab::{Qmp, towline, wait_until};

/// 99 of 100 replies come within this time, also on two busy processors.
const P99_MAX: Duration = Duration::from_millis(50);
const WITHIN: Duration = Duration::from_secs(60);
/// Time limit of the copy in the soak.
const COPY_WITHIN: Duration = Duration::from_secs(300);

#[test]
fn queries_are_answered_while_memory_moves() {
    let mib = number("TOWLINE_SOAK_LATENCY_MIB", 128);
    let directory = TempDir::with_prefix("towline-lab-").unwrap();
    let socket = directory.path().join("ctl.sock");
    let guest = format!("mem:{mib}M,zero=0");
    let copy =
        ["copy", "--json", "--multifd-channels", "4", "--qmp", socket.to_str().unwrap(), &guest, "mem:"];
    let mut copy = towline(copy).unwrap();
    let qmp = wait_until("the control socket", WITHIN, || {
        assert!(copy.runs()?, "it ended: {}", copy.stderr());
        Ok(Qmp::connect(&socket, WITHIN).ok())
    })
    .unwrap();
    let mut took = Vec::new();
    // Until it ends, and its socket with it. Only replies while memory is sent count.
    loop {
        let asked = Instant::now();
        let Ok(answer) = qmp.execute("query-migrate", Value::Null) else { break };
        if answer["status"] == "active" {
            took.push(asked.elapsed());
        }
    }
    let finished = copy.wait_done(COPY_WITHIN).unwrap();
    assert!(!took.is_empty(), "nothing was answered while memory moved: {}", finished.stdout);
    took.sort_unstable();
    let at = |percent: usize| took[(took.len() - 1) * percent / 100];
    println!(
        "{} answers to query-migrate while {mib} MiB moved on 4 lanes: p50 {:?}, p99 {:?}, longest {:?}",
        took.len(),
        at(50),
        at(99),
        at(100)
    );
    assert!(at(99) <= P99_MAX, "p99 {:?}, at most {P99_MAX:?} is allowed", at(99));
}
