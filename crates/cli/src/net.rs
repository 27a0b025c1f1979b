//! `towline net`: a network card for one guest, by vhost-user.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use towline_net::{CopyReason, DropReason, Net, Options, QueueStatistics, Taps, Xdp};
use towline_vhost_user::{Cancel, Device, DeviceWord};

use crate::args::{NetArgs, OnOff};
use crate::console::{self, OverflowPolicy};
use crate::events::{Event, FinalEvent, InterimEvent, Statistics};
use crate::exit::{Exit, UsageError};
use crate::notify::Notifier;
use crate::observability::{card, counters};
use crate::sandbox::{PendingSandbox, Policy};
use crate::serve::{DeviceServer, serve_all};
use crate::signals::{SignalEffects, cancel_on_signals, report_on_signal};
use crate::sockets::inherited;
use crate::state;

/// Options with which the process cannot be confined, and the reason.
const UNCONFINED: &str = "--af-xdp, which opens sockets and maps memory at run time";

const SIGNAL_EFFECTS: SignalEffects = SignalEffects {
    first: "stopping; the card is no longer served",
    second: Some("without statistics, and its socket remains"),
};

/// Runs the command.
pub(crate) fn run(args: &NetArgs) -> Result<Exit> {
    if args.sandbox.is_requested() && args.af_xdp.is_some() {
        let text = format!("--sandbox on cannot be used with {UNCONFINED}: leave one of them out");
        bail!(UsageError(text));
    }
    // First, as it fails while another process serves the card: nothing of that one's tap is changed.
    let frontends = args.access.frontends(args.socket.as_deref(), args.fd)?;
    let taps = taps(args)?;
    let record = state::open_in_flight_record(args.state.as_deref(), 2 * taps.queues().len())?;
    let options = options(args, record.device_word());
    let net = Arc::new(Net::with_xdp(taps, xdp(args)?, options));
    let device: Arc<dyn Device> = net.clone();
    let notifier = Notifier::from_environment();
    let mut sandbox = pending_sandbox(args, net.taps());
    let cancel = cancel_on_signals(SIGNAL_EFFECTS)?;
    let token = cancel.clone();
    let _observers = args.observability.of_devices(vec![card(&net)], move || token.cancel())?;
    let (reported, json) = (Arc::downgrade(&net), args.json);
    report_on_signal(move || reported.upgrade().iter().for_each(|net| print_statistics(net, json)))?;
    end_with_tap(&net, &cancel)?;
    // Everything is open, and no thread reads guest input yet.
    sandbox.finish();
    notifier.ready(&format!("a network card on {}", net.taps().name()));
    let name = format!("net {}", net.taps().name());
    let served = serve_all(vec![DeviceServer { name, device, frontends, record }], &cancel);
    let served = served.and_then(|()| check_tap(&net));
    notifier.stopping();
    match (&served, args.json) {
        (Ok(()), true) => {
            let last = Event::last(FinalEvent::Statistics(Statistics::new(&net)), Exit::Done);
            console::print(OverflowPolicy::Always, &last.line());
        }
        (_, json) => print_statistics(&net, json),
    }
    served.map(|()| Exit::Done)
}

/// Fails if the card has ended because its interface was deleted.
fn check_tap(net: &Net) -> Result<()> {
    let (taps, remedy) = (net.taps(), "create it, and start the card again");
    ensure!(!taps.is_gone(), "the interface {} was deleted; {remedy}", taps.name());
    Ok(())
}

/// Ends the process when its tap is deleted: a card without one is deaf, and a service manager starts a new
/// one.
fn end_with_tap(net: &Arc<Net>, cancel: &Cancel) -> Result<()> {
    let (net, cancel) = (Arc::clone(net), cancel.clone());
    let watch = move || {
        net.taps().wait_gone(&cancel);
        cancel.cancel();
    };
    thread::Builder::new().name("tap-watch".into()).spawn(watch)?;
    Ok(())
}

fn options(args: &NetArgs, word: DeviceWord) -> Options {
    Options {
        cpus: args.cpus.clone(),
        busy_poll: Duration::from_micros(args.poll_us),
        unmigratable: args.unmigratable,
        device_state: args.device_state == OnOff::On,
        hold: args.hold,
        word: Some(word),
    }
}

fn taps(args: &NetArgs) -> Result<Taps> {
    match &args.tap {
        Some(name) => Ok(Taps::open(name, args.queues.unwrap_or(1))?),
        None => Ok(Taps::from_fds(inherited(&args.tap_fds)?)?),
    }
}

/// Takes the sandbox's first step, unless this process opens files later.
fn pending_sandbox(args: &NetArgs, taps: &Taps) -> PendingSandbox {
    if args.af_xdp.is_some() {
        args.sandbox.log_unconfined(UNCONFINED);
        return PendingSandbox::disabled();
    }
    let mut policy = policy(taps);
    args.socket.iter().for_each(|path| policy.removes(path));
    args.observability.extend_policy(&mut policy);
    args.sandbox.begin(policy)
}

/// Returns the policy of a card. The MTU of a tap that towline created follows the guest's (`NET_SET_MTU`).
pub(crate) fn policy(taps: &Taps) -> Policy {
    Policy { sets_mtu: taps.is_created(), submits_to_rings: taps.uses_rings(), ..Policy::default() }
}

fn xdp(args: &NetArgs) -> Result<Option<Xdp>> {
    let Some(name) = &args.af_xdp else { return Ok(None) };
    let sockets = if args.xsk_fds.is_empty() { None } else { Some(inherited(&args.xsk_fds)?) };
    let xdp = Xdp::new(name, args.xsk_queue, sockets)?;
    let xdp = xdp.with_zero_copy_send(args.zero_copy_send);
    Ok(Some(if args.af_xdp_copy { xdp.with_copy_mode() } else { xdp }))
}

/// Prints the statistics of each queue, as text those of the queues with traffic.
fn print_statistics(net: &Net, json: bool) {
    if json {
        let event = Event::Interim(InterimEvent::Statistics(Statistics::new(net)));
        return console::print(OverflowPolicy::Limited, &event.line());
    }
    let mut lines = Vec::new();
    for (index, (pair, mode)) in net.statistics().iter().zip(net.transmit_modes()).enumerate() {
        for (direction, queue) in ["rx", "tx"].into_iter().zip(pair) {
            lines.extend(text(queue).map(|text| format!("{direction} {index}: {text}")));
        }
        if net.uses_xdp() {
            let copies = CopyReason::ALL.map(|reason| (reason.name(), pair[1].copied_because(reason)));
            lines.push(format!("tx {index}: mode {}{}", mode.name(), nonzero(&copies, "copied")));
        }
    }
    if lines.is_empty() {
        lines.push("no traffic".into());
    }
    lines.iter().for_each(|line| console::notice(&format!("net {} {line}", net.taps().name())));
}

/// Formats the counters of a queue above 0, if there are any.
fn text(queue: &QueueStatistics) -> Option<String> {
    let drops = DropReason::ALL.map(|reason| (reason.name(), queue.dropped(reason)));
    let counters = counters(queue).into_iter().filter(|counter| counter.value > 0);
    let counters = counters.map(|counter| format!(", {} {}", counter.value, counter.name));
    let text = counters.collect::<String>() + &nonzero(&drops, "dropped");
    text.strip_prefix(", ").map(str::to_owned)
}

/// Returns the counters above 0, each as `, 5 dropped (malformed)`.
fn nonzero(counters: &[(&str, u64)], what: &str) -> String {
    let counters = counters.iter().filter(|(_, count)| *count > 0);
    counters.map(|(reason, count)| format!(", {count} {what} ({reason})")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_queue_has_no_counters_of_zero() {
        let mut queue = QueueStatistics::default();
        assert_eq!(text(&queue), None);
        (queue.packets, queue.bytes, queue.notifications_suppressed) = (2, 120, 1);
        assert_eq!(text(&queue).as_deref(), Some("2 packets, 120 bytes, 1 notifications-suppressed"));
    }
}
