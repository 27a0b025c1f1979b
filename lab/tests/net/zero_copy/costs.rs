//! The default, by which frames of more than 256 bytes leave by reference: the guest kicks about as often as
//! with copies.

use std::path::Path;

use serde_json::Value;
use towline_lab::{Kernel, require_kernel};

use super::{Bench, Setup, card_line, driver};
use crate::support::sum;

/// Frames of a turn.
const FRAMES: u32 = 6000;
const TURNS: [&str; 4] = ["off", "auto", "auto", "off"];
/// Kicks depend on when driver and card run, on processors that are emulated. What must not happen are three
/// times as many.
const KICKS_PERCENT_MAX: u64 = 180;

#[test]
#[ignore = "nightly"]
fn references_cost_about_as_many_kicks_as_copies() {
    let name = "references_cost_about_as_many_kicks_as_copies";
    if let Ok(socket) = std::env::var(driver::SOCKET) {
        return driver::run(Path::new(&socket));
    }
    if !require_kernel(name, Kernel::Newest) {
        return;
    }
    let mut bench = Bench::start(&format!("zero_copy::costs::{name}"), Setup::default());
    let warm = bench.frames("send", 100);
    bench.wire.wait_for(warm);
    let mut kicks = [0, 0];
    for setting in TURNS {
        let statistics = turn(&mut bench, setting);
        let copies = &statistics["pairs"][0]["tx"]["copies"];
        println!("{setting}: {statistics}");
        let is_auto = setting == "auto";
        kicks[usize::from(is_auto)] += sum(&statistics, "tx", "kicks");
        let disabled = copies["setting"].as_u64().unwrap();
        let referenced = sum(&statistics, "tx", "referenced");
        if is_auto {
            // All but short frames, and those that this driver supports by copies only: in several buffers,
            // across pages.
            let [buffers, pages] = ["buffers", "pages"].map(|reason| copies[reason].as_u64().unwrap());
            assert!(
                referenced + buffers + pages > 3000 && referenced > 1000 && disabled == 0,
                "{statistics}"
            );
        } else {
            assert!(referenced == 0 && disabled > 1000, "{statistics}");
        }
    }
    let [copied, automatic] = kicks;
    println!("kicks: {copied} with copies, {automatic} by default");
    assert!(copied > 0 && automatic * 100 <= copied * KICKS_PERCENT_MAX, "{kicks:?}");
}

/// Sends with this `--zero-copy-send`, by a new process. Returns its statistics.
fn turn(bench: &mut Bench, setting: &str) -> Value {
    bench.end_card();
    bench.card = card_line(1, &format!("--zero-copy-send {setting}"));
    bench.start_card();
    bench.command("connect");
    let sent = bench.frames("send", FRAMES);
    bench.wire.wait_for(sent.clone());
    assert!(sent.into_iter().all(|sequence| bench.wire.count(sequence) == 1));
    bench.assert_zero_copy()
}
