//! Saves the guest of a running QEMU to an image, and lets it continue:
//! `cargo run -p towline-control --example save -- /run/vm.qmp /srv/vm.img`

use std::error::Error;

use towline_channel::Cancel;
use towline_control::plan::{
    self, AfterCopy, CopyRequest, Destination, Observer, Progress, Source, Task, TransferOptions,
};

/// Prints the bytes that remain.
struct Printer;

impl Observer for Printer {
    fn progress(&self, progress: &Progress) {
        if let Some(bytes) = progress.remaining {
            println!("{} MiB remain", bytes >> 20);
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(socket), Some(image)) = (arguments.next(), arguments.next()) else {
        return Err("usage: save QMP-SOCKET IMAGE".into());
    };
    let task =
        Task::Copy { transfer: TransferOptions::default(), after: AfterCopy::SourceResumed, base: None };
    let (source, destination) = (Source::Qmp(socket.into()), Destination::Image(image.into()));
    match plan::copy(&source, &destination, &CopyRequest::new(task), &Cancel::new()?, &Printer) {
        Ok(report) => println!("stored in {:?}; the source: {:?}", report.total_time, report.source),
        // A failure states what has become of the guest, apart from its reason.
        Err(failure) => return Err(format!("{failure}; the guest: {:?}", failure.guest).into()),
    }
    Ok(())
}
