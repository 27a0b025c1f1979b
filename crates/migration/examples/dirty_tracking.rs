//! Measures the cost of tracking a guest's writes on this machine: `cargo run --release --example
//! dirty_tracking [GIB]`.
//!
//! ```text
//!   harvest   of GIB of small pages: nothing written, 1 % written at random, all written
//!   fault     the first write to a page that is tracked, beside the kernel's plainest write-protect fault: that of a page
//!             which a child shared until it ended (found exclusive, made writable again, nothing copied)
//! ```
//!
//! Memory is touched before anything is timed. Median of the rounds, with the smallest and the largest.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use towline_migration::tracker::WriteProtect;
use towline_migration::{DirtyTracker, RamMapping, Span};

const PAGE: usize = 4096;
const ROUNDS: usize = 9;
/// Pages of the fault's measurement: 256 MiB.
const FAULT_PAGES: usize = 64 << 10;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let gib: usize = std::env::args().nth(1).map_or(Ok(4), |text| text.parse())?;
    let tracker = WriteProtect::new()?;
    harvests(&tracker, gib << 30)?;
    faults(&tracker)
}

fn harvests(tracker: &WriteProtect, length: usize) -> Result<(), Error> {
    let region = RamMapping::anonymous(length)?;
    let span = region.span();
    touch(&span, 1);
    let begun = Instant::now();
    tracker.start(&[span], &mut |_, _| {})?;
    println!("{} GiB of 4 KiB pages: start {:.1} ms", length >> 30, ms(begun.elapsed()));
    let mut rng = fastrand::Rng::with_seed(7);
    type Write<'a> = &'a mut dyn FnMut();
    let pages = length / PAGE;
    let rows: [(&str, Write<'_>); 3] = [
        ("nothing written", &mut || {}),
        ("1 % written, at random", &mut || {
            (0..pages / 100).for_each(|_| span.write(rng.usize(0..pages) * PAGE, &[1]));
        }),
        ("all written", &mut || touch(&span, 1)),
    ];
    for (name, write) in rows {
        let mut times = Vec::new();
        let (mut bytes, mut runs) = (0, 0);
        for _ in 0..ROUNDS {
            write();
            (bytes, runs) = (0, 0);
            let begun = Instant::now();
            tracker.harvest(&[span], &mut |_, length| (bytes, runs) = (bytes + length, runs + 1))?;
            times.push(begun.elapsed());
        }
        println!("  harvest, {name}: {} ms ({} MiB in {runs} runs)", spread(&mut times, ms), bytes >> 20);
    }
    let begun = Instant::now();
    tracker.stop(&[span])?;
    println!("  stop {:.1} ms", ms(begun.elapsed()));
    Ok(())
}

fn faults(tracker: &WriteProtect) -> Result<(), Error> {
    let region = RamMapping::anonymous(FAULT_PAGES * PAGE)?;
    let span = region.span();
    touch(&span, 1);
    let each = |time: Duration| time.as_secs_f64() * 1e9 / FAULT_PAGES as f64;
    let (mut plain, mut tracked, mut shared) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        plain.push(timed(|| touch(&span, 2)));
        share_with_a_child_that_ends()?;
        shared.push(timed(|| touch(&span, 3)));
        tracker.start(&[span], &mut |_, _| {})?;
        tracked.push(timed(|| touch(&span, 4)));
        tracker.stop(&[span])?;
    }
    println!("first write to each of {FAULT_PAGES} pages, ns:");
    println!("  writable          {}", spread(&mut plain, each));
    println!("  shared by a fork  {}", spread(&mut shared, each));
    println!("  tracked           {}", spread(&mut tracked, each));
    println!("  tracked / shared by a fork: {:.2}", each(tracked[ROUNDS / 2]) / each(shared[ROUNDS / 2]));
    Ok(())
}

/// Forks: a command that is to have a user, be it ours, is not started by `vfork`. When it has ended, all
/// memory is ours alone again, and write-protected.
fn share_with_a_child_that_ends() -> Result<(), Error> {
    let uid = std::fs::metadata("/proc/self")?.uid();
    let status = std::process::Command::new("/bin/true").uid(uid).status()?;
    if status.success() { Ok(()) } else { Err(format!("/bin/true: {status}").into()) }
}

fn touch(span: &Span<'_>, byte: u8) {
    (0..span.length()).step_by(PAGE).for_each(|offset| span.write(offset, &[byte]));
}

fn timed(work: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// `median (smallest–largest)`; sorts them.
fn spread(times: &mut [Duration], unit: impl Fn(Duration) -> f64) -> String {
    times.sort_unstable();
    let [first, .., last] = times else { return String::new() };
    let (first, last) = (unit(*first), unit(*last));
    format!("{:.1} ({first:.1}–{last:.1})", unit(times[times.len() / 2]))
}
