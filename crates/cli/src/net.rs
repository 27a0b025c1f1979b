//! `towline net`: a network card for one guest, by vhost-user.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;
use towline_net::{CopyReason, DropReason, Net, Options, QueueStatistics, Taps, Xdp};
use towline_vhost_user::{Device, FrontendSource, InFlightRecord, Listener, Service, UpgradeOffer};

use crate::args::{NetArgs, OnOff};
use crate::backend::{NO_ACTIVATION, missing_socket};
use crate::console::{self, OverflowPolicy};
use crate::exit::{Exit, UsageError};
use crate::live_upgrade::{self, DeviceServer, ServeEnd, ShutdownSignal, UpgradeListener};
use crate::notify::Notifier;
use crate::observability::card;
use crate::sandbox::{PendingSandbox, Policy};
use crate::signals::{SignalEffects, end_at_once, first_signal, shutdown_signals};
use crate::{events, state};

/// Options with which the process cannot be confined, and the reason.
const UNCONFINED: &str = "--af-xdp or --upgrade-socket, which open sockets and map memory at run time";

const SIGNAL_EFFECTS: SignalEffects = SignalEffects {
    first: "stopping; the card is no longer served",
    second: Some("without statistics, and its socket remains"),
};

/// Runs the command.
pub(crate) fn run(args: &NetArgs) -> Result<Exit> {
    if let Some(text) = usage_error(args) {
        return Err(UsageError(text).into());
    }
    let mut previous = Previous::request(args)?;
    let taps = previous.taps(args)?;
    if let Some(mtu) = args.mtu {
        taps.set_mtu(mtu)?;
    }
    let net = Arc::new(Net::with_xdp(taps, xdp(args)?, options(args)));
    let device: Arc<dyn Device> = net.clone();
    let upgrade_socket = previous.upgrade_socket.take();
    let (service, record) = previous.service(args, &device)?;
    let shutdown = ShutdownSignal::new()?;
    let listener = args.upgrade_socket.as_deref();
    let listener =
        listener.map(|path| UpgradeListener::start(path, upgrade_socket, &shutdown)).transpose()?;
    let notifier = Notifier::from_environment();
    let mut sandbox = pending_sandbox(args, net.taps());
    let signal = shutdown.clone();
    let _observers = args.observability.of_devices(vec![card(&net)], move || signal.shut_down())?;
    handle_signals(&net, &shutdown, args.json)?;
    // Everything is open, and no thread reads guest input yet.
    sandbox.finish();
    notifier.ready(&format!("a network card on {}", net.taps().name()));
    let server = DeviceServer {
        device: &device,
        descriptors: net.taps().queues().iter().map(AsFd::as_fd).collect(),
        record: &record,
        shutdown: &shutdown,
        listener,
        on_failure: &|| net.taps().reattach(),
    };
    let served = server.serve(service);
    notifier.stopping();
    match (&served, args.json) {
        (Ok(_), true) => {
            let fields = events::with_exit(statistics(&net), Exit::Done);
            console::print(OverflowPolicy::Always, &events::line("statistics", fields));
        }
        (_, json) => print_statistics(&net, json),
    }
    if let ServeEnd::Upgraded = served? {
        tracing::info!("another process serves the card now");
    }
    Ok(Exit::Done)
}

/// Returns the reason to refuse the options.
fn usage_error(args: &NetArgs) -> Option<String> {
    let missing = missing_socket(args.socket.as_deref(), args.fd);
    if let Some(text) = missing.or_else(|| args.access.without_path(args.socket.as_deref())) {
        return Some(text.into());
    }
    (args.sandbox.is_requested() && opens_later(args))
        .then(|| format!("--sandbox on cannot be used with {UNCONFINED}: leave one of them out"))
}

/// Returns true if the card opens sockets and maps memory after its start.
fn opens_later(args: &NetArgs) -> bool {
    args.af_xdp.is_some() || args.upgrade_socket.is_some()
}

fn options(args: &NetArgs) -> Options {
    Options {
        cpus: args.cpus.clone(),
        busy_poll: Duration::from_micros(args.poll_us),
        unmigratable: args.unmigratable,
        device_state: args.device_state == OnOff::On,
    }
}

/// The process that serves the card so far, if there is one, and its descriptors.
struct Previous {
    offer: Option<UpgradeOffer>,
    /// Socket on which the next live upgrade is requested.
    upgrade_socket: Option<OwnedFd>,
    queues: Vec<OwnedFd>,
}

impl Previous {
    fn request(args: &NetArgs) -> Result<Self> {
        let mut offer = args.upgrade_socket.as_deref().map(live_upgrade::request).transpose()?.flatten();
        let mut queues = offer.as_mut().map(UpgradeOffer::take_device_fds).unwrap_or_default();
        let upgrade_socket = (!queues.is_empty()).then(|| queues.remove(0));
        Ok(Self { offer, upgrade_socket, queues })
    }

    /// Returns the taps, those of the previous process first; refuses its offer on failure.
    fn taps(&mut self, args: &NetArgs) -> Result<Taps> {
        let taps = match (&self.offer, &args.tap) {
            (Some(_), _) => adopted_taps(args, std::mem::take(&mut self.queues)),
            (None, Some(name)) => Taps::open(name, args.queues.unwrap_or(1)).map_err(Into::into),
            (None, None) => inherited(&args.tap_fds).and_then(|fds| Ok(Taps::from_fds(fds)?)),
        };
        taps.inspect_err(|error| {
            if let Some(offer) = self.offer.take() {
                offer.refuse(&format!("{error:#}"));
            }
        })
    }

    /// Takes the device over, or starts to serve it.
    fn service(self, args: &NetArgs, device: &Arc<dyn Device>) -> Result<(Service, InFlightRecord)> {
        match self.offer {
            Some(offer) => {
                Ok(offer.accept(device, |listener| listener.map(|fd| adopted_listener(args, fd)))?)
            }
            None => {
                let service = Service::new(frontends(args)?);
                Ok((service, state::open_in_flight_record(args.state.as_deref(), device.queue_count())?))
            }
        }
    }
}

/// Takes the sandbox's first step, unless this process opens files later.
fn pending_sandbox(args: &NetArgs, taps: &Taps) -> PendingSandbox {
    if opens_later(args) {
        args.sandbox.log_unconfined(UNCONFINED);
        return PendingSandbox::disabled();
    }
    let mut policy = policy(taps);
    args.socket.iter().for_each(|path| policy.removes(path));
    args.observability.extend_policy(&mut policy);
    args.sandbox.begin(&policy)
}

/// Returns the policy of a card. The MTU of a tap that towline created follows the guest's (`NET_SET_MTU`).
pub(crate) fn policy(taps: &Taps) -> Policy {
    Policy { sets_mtu: taps.is_created(), submits_to_rings: taps.uses_rings(), ..Policy::default() }
}

/// Returns the taps of the previous process, if they match the options.
fn adopted_taps(args: &NetArgs, fds: Vec<OwnedFd>) -> Result<Taps> {
    let taps = Taps::from_fds(fds)?;
    let (name, queues) = (taps.name(), taps.queues().len());
    if let Some(wanted) = args.tap.as_deref().filter(|wanted| *wanted != name) {
        anyhow::bail!("live upgrade: the running process has the tap {name}, expected {wanted} (--tap)");
    }
    let wanted = args.queues.unwrap_or(1);
    if args.tap.is_some() && wanted != queues {
        anyhow::bail!(
            "live upgrade: the running process has {queues} queue pairs, expected {wanted} (--queues)"
        );
    }
    Ok(taps)
}

fn frontends(args: &NetArgs) -> Result<FrontendSource> {
    match (&args.socket, args.fd) {
        (Some(path), _) => Ok(FrontendSource::Listen(args.access.listen(path)?)),
        (None, Some(number)) => {
            let fd = inherited(&[number])?.pop().context("one descriptor")?;
            Ok(FrontendSource::from_fd(fd)?)
        }
        (None, None) => FrontendSource::from_service_manager()?.context(NO_ACTIVATION),
    }
}

/// Returns the listening socket of the previous process.
fn adopted_listener(args: &NetArgs, fd: OwnedFd) -> FrontendSource {
    match &args.socket {
        Some(path) => FrontendSource::Listen(Listener::adopt(fd, path)),
        None => FrontendSource::Inherited(fd),
    }
}

fn xdp(args: &NetArgs) -> Result<Option<Xdp>> {
    let Some(name) = &args.af_xdp else { return Ok(None) };
    let sockets = if args.xsk_fds.is_empty() { None } else { Some(inherited(&args.xsk_fds)?) };
    let xdp = Xdp::new(name, args.xsk_queue, sockets)?;
    let xdp = xdp.with_zero_copy_send(args.zero_copy_send.into());
    Ok(Some(if args.af_xdp_copy { xdp.with_copy_mode() } else { xdp }))
}

/// Takes ownership of inherited descriptors.
fn inherited(numbers: &[i32]) -> Result<Vec<OwnedFd>> {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        anyhow::bail!("descriptor {} is given twice: give each queue one of its own", pair[0]);
    }
    if let Some(number) = sorted.first().filter(|number| **number <= 2) {
        anyhow::bail!("descriptor {number} is standard input, output or error: give one above 2");
    }
    let own = |number: &i32| {
        towline_channel::take_over(*number).with_context(|| {
            format!("descriptor {number} is not open: start towline without close-on-exec on it")
        })
    };
    numbers.iter().map(own).collect()
}

fn handle_signals(net: &Arc<Net>, shutdown: &ShutdownSignal, json: bool) -> Result<()> {
    console::start();
    let mut signals =
        Signals::new(shutdown_signals().into_iter().chain([SIGUSR1])).context("signal handlers")?;
    let (net, shutdown) = (Arc::clone(net), shutdown.clone());
    thread::Builder::new().name("signals".into()).spawn(move || {
        let mut is_ending = false;
        for signal in signals.forever() {
            match signal {
                SIGUSR1 => print_statistics(&net, json),
                _ if is_ending => end_at_once(signal),
                _ => {
                    is_ending = true;
                    first_signal(signal, SIGNAL_EFFECTS, || shutdown.shut_down());
                }
            }
        }
    })?;
    Ok(())
}

/// Prints the statistics of each queue, as text those of the queues with traffic.
fn print_statistics(net: &Net, json: bool) {
    if json {
        console::print(OverflowPolicy::Limited, &events::line("statistics", statistics(net)));
        return;
    }
    let pairs = net.statistics();
    let mut lines = Vec::new();
    for (index, pair) in pairs.iter().enumerate() {
        for (direction, queue) in ["rx", "tx"].into_iter().zip(pair) {
            lines.extend(text(queue).map(|text| format!("{direction} {index}: {text}")));
        }
        if net.uses_xdp() {
            let (transmit, mode) = (&pair[1], net.transmit_modes()[index]);
            let copies = CopyReason::ALL.map(|reason| (reason.name(), transmit.copied_because(reason)));
            let counters = [
                ("frames zero-copy", transmit.zero_copy),
                ("by reference", transmit.referenced),
                ("pending", transmit.pending),
            ];
            let counters = counters.into_iter().filter(|(_, count)| *count > 0);
            let counters: String = counters.map(|(what, count)| format!(", {count} {what}")).collect();
            let copies = nonzero(&copies, "copied");
            lines.push(format!("tx {index}: mode {}{counters}{copies}", mode.name()));
        }
    }
    if lines.is_empty() {
        lines.push("no traffic".into());
    }
    lines.iter().for_each(|line| console::notice(&format!("net {} {line}", net.taps().name())));
}

/// Returns the fields of the event `statistics`.
fn statistics(net: &Net) -> Value {
    let pairs: Vec<Value> = net
        .statistics()
        .iter()
        .zip(net.transmit_modes())
        .map(|([receive, transmit_counters], mode)| {
            let mut transmit = object(transmit_counters);
            transmit["mode"] = mode.name().into();
            if net.uses_xdp() {
                transmit["copies"] = copies(transmit_counters);
            }
            json!({ "rx": object(receive), "tx": transmit })
        })
        .collect();
    json!({ "tap": net.taps().name(), "pairs": pairs })
}

fn object(queue: &QueueStatistics) -> Value {
    let drops = DropReason::ALL.map(|reason| (reason.name().to_owned(), queue.dropped(reason).into()));
    json!({
        "packets": queue.packets,
        "bytes": queue.bytes,
        "batches": queue.batches,
        "notifications": queue.notifications,
        "notifications-suppressed": queue.notifications_suppressed,
        "kicks": queue.kicks,
        "copied": queue.copied,
        "zero-copy": queue.zero_copy,
        "referenced": queue.referenced,
        "pending": queue.pending,
        "drops": Value::Object(drops.into_iter().collect()),
    })
}

/// Returns the copied frames by reason.
fn copies(queue: &QueueStatistics) -> Value {
    let copies =
        CopyReason::ALL.map(|reason| (reason.name().to_owned(), queue.copied_because(reason).into()));
    Value::Object(copies.into_iter().collect())
}
/// Formats the counters of a queue above 0, if there are any.
fn text(queue: &QueueStatistics) -> Option<String> {
    let drops = DropReason::ALL.map(|reason| (reason.name(), queue.dropped(reason)));
    let counters = [
        (queue.packets, "packets"),
        (queue.bytes, "bytes"),
        (queue.batches, "batches"),
        (queue.notifications, "notifications sent"),
        (queue.notifications_suppressed, "notifications suppressed"),
        (queue.kicks, "kicks"),
        (queue.copied, "copied"),
    ];
    let counters = counters.into_iter().filter(|(count, _)| *count > 0);
    let counters = counters.map(|(count, what)| format!(", {count} {what}")).collect::<String>();
    let text = counters + &nonzero(&drops, "dropped");
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
        assert_eq!(text(&queue).as_deref(), Some("2 packets, 120 bytes, 1 notifications suppressed"));
    }
}
