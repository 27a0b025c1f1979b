//! Facts from anywhere: they are read or refused, and evaluated, in bounded time and memory. The body is a
//! fuzz target too.

use towline_compat::{ConfiguredBy, Facts, Pair, evaluate};

/// Reads bytes as facts, and compares the result with itself in both directions.
pub fn facts(bytes: &[u8]) {
    let middle = bytes.len() / 2;
    let parts = [bytes, &bytes[..middle], &bytes[middle..]];
    let read: Vec<Facts> = parts.iter().filter_map(|part| Facts::parse(part).ok()).collect();
    for source in &read {
        assert!(Facts::parse(&source.to_json()).is_ok(), "written facts are read back");
        for destination in &read {
            let pair = Pair {
                source,
                destination,
                lanes: Some(2),
                is_postcopy: true,
                is_live: true,
                is_one_host: true,
                copies_disks: false,
            };
            let report = evaluate(&pair);
            let _ = (
                report.verdict(ConfiguredBy::Towline),
                report.notes(ConfiguredBy::ByHand),
                report.reasons(ConfiguredBy::Towline),
            );
        }
    }
}

#[test]
fn every_seed_is_evaluated() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/facts");
    let mut count = 0;
    for entry in std::fs::read_dir(directory).expect("the seeds are in the repository") {
        let bytes = std::fs::read(entry.expect("a seed").path()).expect("a seed");
        assert!(Facts::parse(&bytes).is_ok(), "{}", String::from_utf8_lossy(&bytes));
        facts(&bytes);
        // Any part of them, too.
        (0..bytes.len()).step_by(7).for_each(|end| facts(&bytes[..end]));
        count += 1;
    }
    assert!(count >= 4, "{count}");
}
