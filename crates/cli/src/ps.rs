//! `towline ps`.

use std::time::Duration;

use anyhow::Result;
use rustix::time::{ClockId, clock_gettime};
use towline_launch::{RunningGuest, RuntimeRoot};

use crate::args::PsArgs;
use crate::console;
use crate::events::{FinalEvent, InterimEvent, ListedGuest};
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::status::query;
use crate::units::{age, size};

/// Time limit of a guest's QEMU for its state.
const STATE_TIMEOUT: Duration = Duration::from_millis(200);

/// Runs the command.
pub(crate) fn run(args: &PsArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).blocking();
    let (mut guests, mut unreadable) = (Vec::new(), None);
    for guest in RuntimeRoot::of_user().guests()? {
        match guest {
            Ok(guest) => guests.push(guest),
            Err(error) => unreadable = Some(error),
        }
    }
    if !guests.is_empty() {
        let heading = ["NAME", "PID", "STATE", "AGE", "MEMORY", "IMAGE"];
        let [name, pid, state, age, memory, image] = heading;
        reporter.line(&format!("{name:<20} {pid:>8}  {state:<14} {age:>7} {memory:>11}  {image}"));
    }
    guests.iter().for_each(|guest| report(guest, &reporter));
    unreadable.map_or(Ok(()), Err)?;
    let exit = reporter.result(FinalEvent::Guests { guests: guests.len() }, Exit::Done);
    if guests.is_empty() {
        reporter.line("no guests of this user on this host");
    }
    Ok(exit)
}

fn report(guest: &RunningGuest, reporter: &Reporter) {
    let (name, pid) = (&guest.name, guest.pid);
    if reporter.output.quiet {
        return console::print_blocking(name);
    }
    // None if another client holds the monitor, or QEMU is busy.
    let state = query(&guest.qmp, STATE_TIMEOUT).ok().map(|status| status.status.to_string());
    let (since, resident) = (since(guest), resident(pid));
    let listed = ListedGuest::new(guest, state.as_deref(), since, resident);
    let image = listed.image.clone().unwrap_or_default();
    reporter.event(InterimEvent::Guest(listed));
    let detached = if guest.is_detached { "  detached" } else { "" };
    let (state, age) = (state.as_deref().unwrap_or("busy"), since.map(age).unwrap_or_default());
    let memory = resident.map(size).unwrap_or_default();
    reporter.line(&format!("{name:<20} {pid:>8}  {state:<14} {age:>7} {memory:>11}  {image}{detached}"));
}

/// Time since its QEMU was started.
fn since(guest: &RunningGuest) -> Option<Duration> {
    let uptime = Duration::try_from(clock_gettime(ClockId::Boottime)).ok()?;
    let hertz = rustix::param::clock_ticks_per_second().max(1);
    Some(uptime.saturating_sub(Duration::from_millis(guest.start_time * 1000 / hertz)))
}

/// Resident memory of a process in bytes, with the pages of its image that it has touched.
fn resident(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let text = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    text.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib * 1024)
}
