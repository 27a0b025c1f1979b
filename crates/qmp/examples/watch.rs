//! Prints the version of a QEMU, the state of its guest, and its events as they come:
//! `cargo run -p towline-qmp --example watch -- /run/vm.qmp [SECONDS]`

use std::time::{Duration, Instant};

use towline_qmp::commands::{QueryStatus, QueryVersion};
use towline_qmp::{Client, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: watch QMP-SOCKET [SECONDS]")?;
    let seconds = arguments.next().map_or(Ok(10), |text| text.parse())?;

    let mut client = Client::connect(&path, &Options::default())?;
    let version = client.execute(&QueryVersion)?;
    let status = client.execute(&QueryStatus)?;
    println!("QEMU {} on {path}: {}", version.qemu, status.status);

    // A command without a type goes by its name.
    let block = client.execute_raw("query-block", None)?;
    println!("{} drives", block.as_array().map_or(0, Vec::len));

    let until = Instant::now() + Duration::from_secs(seconds);
    while let Some(event) = client.next_event(until.saturating_duration_since(Instant::now()))? {
        println!("{} {}", event.name, serde_json::to_string(&event.data)?);
    }
    Ok(())
}
