//! Prints the verdict about two files of facts, which `towline check --facts-out` writes:
//! `cargo run -p towline-compat --example verdict -- SOURCE.facts DESTINATION.facts`

use std::error::Error;

use towline_compat::{ConfiguredBy, Facts, Pair, evaluate};

fn main() -> Result<(), Box<dyn Error>> {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let [source, destination] = &paths[..] else {
        return Err("usage: verdict SOURCE.facts DESTINATION.facts".into());
    };
    let (source, destination) = (read(source)?, read(destination)?);
    let report = evaluate(&Pair {
        source: &source,
        destination: &destination,
        lanes: None,
        is_postcopy: false,
        is_live: false,
        is_one_host: false,
        copies_disks: false,
    });
    for (name, way) in [("by towline", ConfiguredBy::Towline), ("by hand", ConfiguredBy::ByHand)] {
        println!("migration configured {name}: {}", report.verdict(way));
        for finding in report.of(way) {
            println!("  {finding}");
        }
    }
    Ok(())
}

fn read(path: &str) -> Result<Facts, Box<dyn Error>> {
    Ok(Facts::parse(&std::fs::read(path).map_err(|error| format!("{path}: {error}"))?)?)
}
