//! Prints what an image keeps of the command line of a running QEMU, and what it leaves out:
//! `cargo run -p towline-launch --example record -- PID`

use std::error::Error;

use towline_launch::CommandLine;

fn main() -> Result<(), Box<dyn Error>> {
    let pid = std::env::args().nth(1).ok_or("usage: record PID")?.parse()?;
    let recorded = CommandLine::of_process(pid)?.record()?;
    for argument in recorded.command_line().to_arguments() {
        println!("{}", argument.to_string_lossy());
    }
    for address in recorded.redacted_keys() {
        println!("left out: {address}");
    }
    Ok(())
}
