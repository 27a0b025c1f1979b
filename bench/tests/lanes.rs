//! The benchmark of lanes runs, with small guests whose figures are meaningless.

use std::path::Path;
use std::time::Duration;

use towline_bench::lanes::{Load, Parameters, calls, measure};
use towline_bench::table::{Content, Table};
use towline_channel::Cancel;
use towline_lab::require_lab;

/// Returns the parameters of the smallest guest.
fn parameters(has_qemu: bool) -> Parameters {
    let program = Path::new(env!("CARGO_BIN_EXE_towline-bench"));
    Parameters {
        memory_mib: 32,
        calls_mib: 32,
        lanes: vec![1, 3],
        iperf_seconds: 1,
        has_qemu,
        ..Parameters::of(program, 1, Cancel::new().expect("a descriptor is left"))
    }
}

/// Asserts that every row has figures; iperf3 and zero-copy may be missing.
fn assert_measured(tables: &[Table]) {
    let missing: Vec<_> = tables
        .iter()
        .flat_map(|table| &table.rows)
        .filter(|row| !row.label.contains("iperf3") && !row.label.contains("zero-copy"))
        .filter(|row| matches!(row.content, Content::Missing(_)))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(tables.iter().all(|table| !table.rows.is_empty()), "{tables:?}");
}

#[test]
fn every_row_of_lanes_is_measured() {
    let test = "every_row_of_lanes_is_measured";
    if !require_lab(test) {
        return;
    }
    let parameters = parameters(true);
    let tables = measure(&parameters, &[Load::Idle]).unwrap();
    let names: Vec<_> = tables.iter().map(|table| table.name).collect();
    assert_eq!(names, ["lanes", "lanes-cold", "lanes-goals"]);
    assert_measured(&tables);
    assert!(tables.last().unwrap().rows.iter().any(|row| row.label.contains("QEMU")), "{tables:?}");
}

#[test]
fn busy_and_pinned_rows_are_measured_without_qemu() {
    let parameters = parameters(false);
    let tables = measure(&parameters, &[Load::Stress, Load::Pinned]).unwrap();
    let names: Vec<_> = tables.iter().map(|table| table.name).collect();
    assert_eq!(names, ["lanes-stress", "lanes-pinned", "lanes-goals"]);
    assert_measured(&tables);
}

#[test]
fn vectored_sends_need_fewer_calls() {
    let parameters = parameters(false);
    let tables = calls(&parameters).unwrap();
    assert_measured(&tables);
    let source = |row: usize, key: &str| match &tables[0].rows[row].content {
        Content::Measured { data, .. } => data["source"][key].as_u64().unwrap(),
        Content::Missing(reason) => panic!("{reason}"),
    };
    for pair in [[0, 1], [2, 3]] {
        let pages = pair.map(|row| source(row, "plain-pages") + source(row, "duplicate-pages"));
        assert_eq!(pages, [32 << 8; 2]);
        // 256 pages per call, or 128 with a packet's header, against 8.
        let [linear, vectored] = pair.map(|row| source(row, "sends"));
        assert!(vectored * 10 < linear, "{vectored} {linear}");
    }
}

#[test]
fn a_cancelled_run_ends() {
    let parameters = parameters(false);
    let cancel = parameters.cancel.clone();
    let canceller = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        cancel.cancel();
    });
    let error = measure(&Parameters { runs: 1000, ..parameters }, &[Load::Idle]).unwrap_err();
    assert!(error.is::<towline_channel::Error>(), "{error:#}");
    canceller.join().unwrap();
}

#[test]
fn an_end_that_does_not_start_is_an_error() {
    let program = Path::new("/nowhere/towline-bench");
    let parameters = Parameters::of(program, 1, Cancel::new().expect("a descriptor is left"));
    let error = calls(&parameters).unwrap_err();
    assert!(format!("{error:#}").contains("/nowhere/towline-bench cannot be started"), "{error:#}");
}
