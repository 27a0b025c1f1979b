//! The benchmark of images runs, with a small guest whose figures are meaningless.

use std::time::{Duration, Instant};

use towline_bench::ram::{Parameters, measure};
use towline_bench::table::Content;
use towline_channel::Cancel;
use towline_lab::{require_lab, skip, towline_binary};

fn parameters(name: &str) -> Option<Parameters> {
    if !require_lab(name) {
        return None;
    }
    match towline_binary() {
        Ok(towline) => Some(Parameters {
            memory_mib: 256,
            data_mib: 64,
            tcp_time: Duration::from_secs(1),
            ..Parameters::of(&towline, 1, Cancel::new().expect("a descriptor is left"))
        }),
        Err(error) => {
            skip(name, &format!("{error:#}"));
            None
        }
    }
}

#[test]
fn every_row_is_measured_and_files_are_removed() {
    let Some(parameters) = parameters("every_row_is_measured_and_files_are_removed") else { return };
    let directory = tempfile::tempdir().unwrap();
    let parameters = Parameters { directory: directory.path().into(), ..parameters };
    let tables = measure(&parameters).unwrap();
    let names: Vec<_> = tables.iter().map(|table| table.name).collect();
    assert_eq!(names, ["save", "restore", "goals", "limits", "counters"]);
    let missing: Vec<_> = tables
        .iter()
        .flat_map(|table| &table.rows)
        // iperf3 and direct I/O may be missing.
        .filter(|row| !row.label.contains("iperf3") && !row.label.contains("direct-io"))
        .filter(|row| matches!(row.content, Content::Missing(_)))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(tables.iter().all(|table| !table.rows.is_empty()), "{tables:?}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "files are left");
}

#[test]
fn a_cancelled_run_ends_and_removes_its_files() {
    let Some(parameters) = parameters("a_cancelled_run_ends_and_removes_its_files") else { return };
    let directory = tempfile::tempdir().unwrap();
    let parameters = Parameters { directory: directory.path().into(), ..parameters };
    let cancel = parameters.cancel.clone();
    let canceller = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(1500));
        cancel.cancel();
        Instant::now()
    });
    let error = measure(&parameters).unwrap_err();
    assert!(error.is::<towline_channel::Error>(), "{error:#}");
    canceller.join().unwrap();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "files are left");
}
