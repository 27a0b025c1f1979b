//! Guest memory in huge pages: a descriptor may cross pages of 4 KiB, unless an IOMMU maps each of them
//! somewhere else.

use std::path::Path;

use serde_json::Value;
use towline_lab::{Kernel, require_kernel, wait_until};

use super::{Bench, Pages, Setup, driver};
use crate::support::{WITHIN, sum};

#[test]
#[ignore = "nightly"]
fn frames_across_pages_within_a_huge_page_are_not_copied() {
    let name = "frames_across_pages_within_a_huge_page_are_not_copied";
    let setup = Setup { pages: Pages::Huge, ..Setup::default() };
    let Some(mut bench) = start(name, setup) else { return };
    let sent = bench.frames("send", 1500);
    bench.wire.wait_for(sent);
    let statistics = bench.assert_zero_copy();
    println!("{statistics}");
    assert_eq!(copies(&statistics, "pages"), 0, "{statistics}");
    assert!(sum(&statistics, "tx", "zero-copy") > 0 && copies(&statistics, "buffers") > 0, "{statistics}");
}

/// The kernel discards descriptors across pages that are not contiguous for the card. It does so silently:
/// the card notices it by the kernel's counter, and splits its references from then on.
#[test]
#[ignore = "nightly"]
fn pages_that_an_iommu_scatters_are_not_crossed() {
    let name = "pages_that_an_iommu_scatters_are_not_crossed";
    let setup = Setup { pages: Pages::Scattered, ..Setup::default() };
    let Some(mut bench) = start(name, setup) else { return };
    bench.frames("send", 1500);
    wait_until("a queue that splits at pages", WITHIN, || {
        bench.frames("send", 200);
        Ok((copies(&bench.statistics(), "pages") > 0).then_some(()))
    })
    .unwrap();
    let errors = bench.card_errors();
    assert!(errors.contains("descriptors as invalid"), "{errors}");
    let sent = bench.frames("send", 1500);
    bench.wire.wait_for(sent.clone());
    assert!(sent.into_iter().all(|sequence| bench.wire.count(sequence) == 1));
    bench.assert_zero_copy();
    assert_eq!(bench.card_errors(), errors, "no further descriptor is invalid");
}

fn start(name: &str, setup: Setup<'_>) -> Option<Bench> {
    if let Ok(socket) = std::env::var(driver::SOCKET) {
        driver::run(Path::new(&socket));
        return None;
    }
    require_kernel(name, Kernel::Newest).then(|| Bench::start(&format!("zero_copy::pages::{name}"), setup))
}

fn copies(statistics: &Value, reason: &str) -> u64 {
    statistics["pairs"][0]["tx"]["copies"][reason].as_u64().unwrap()
}
