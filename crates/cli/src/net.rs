//! `towline net`: a network card for one guest, behind vhost-user.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;
use towline_net::{DropReason, Net, Options, QueueStatistics, Taps, Xdp};
use towline_vhost_user::{Device, Frontends, Listener, Service, UpgradeOffer};

use crate::args::Switch;
use crate::backend::{NOT_PASSED, lacks_socket};
use crate::console::{self, Keep};
use crate::hand_over::{self, Ended, Successors, Wishes};
use crate::notify::Notifier;
use crate::sandbox::{Confinement, Policy, SandboxArgs};
use crate::signals::ending;
use crate::sockets::SocketArgs;
use crate::watch::{WatchArgs, card};
use crate::{Exit, state};

/// Give a guest a network card whose packets go to a tap of this host, by vhost-user: multiqueue, with every offload of
/// the tap, and QEMU migrates the guest
///
/// A tap that is not there is made, brought up, and gone when this process ends; one that shall stay, on a bridge for
/// instance, is made beforehand. SIGTERM and Ctrl-C end in order, and print what each queue did; SIGUSR1 prints it now.
/// A process that dies and is started again takes its guest back, if QEMU's chardev has `reconnect=`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  A tap with four queues on a bridge, and QEMU with it (its memory must be shared):
    ip tuntap add dev vm0 mode tap multi_queue vnet_hdr
    ip link set vm0 master br0 up
    towline net --socket /run/vm/net0.sock --tap vm0 --queues 4
    qemu-system-x86_64 … -object memory-backend-memfd,id=mem,size=4G,share=on -machine q35,memory-backend=mem \\
      -chardev socket,id=net0,path=/run/vm/net0.sock,reconnect=1 \\
      -netdev vhost-user,id=n0,chardev=net0,queues=4 -device virtio-net-pci,netdev=n0,mq=on
  The same for a domain of libvirt, by its XML:
    <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
    <interface type='vhostuser'>
      <source type='unix' path='/run/vm/net0.sock' mode='client'><reconnect enabled='yes' timeout='1'/></source>
      <model type='virtio'/><driver queues='4'/>
    </interface>
  Taps that a manager opened (descriptors 5 and 6), threads on processors 2 and 3:
    towline net --fd 4 --tap-fds 5:6 --cpus 2,3
  A guest that sends without a copy: its memory is pinned, and queue 0 of a network card's function reads it. What the guest
  receives comes by a macvtap of the same function (see docs/af-xdp.md for which drivers, and what else they want):
    ip link add link ens1f0 name vm0 address 52:54:00:00:00:01 type macvtap mode bridge && ip link set vm0 up
    towline net --socket /run/vm/net0.sock --tap vm0 --af-xdp ens1f0

Exit codes: 0 ended as asked; 1 failed or refused, with the reason; 2 usage.
")]
pub(crate) struct NetArgs {
    /// Where QEMU connects to; a stale socket there is replaced. Without it and --fd: the socket of a service manager
    #[arg(long, value_name = "PATH", visible_alias = "socket-path", conflicts_with = "fd")]
    socket: Option<PathBuf>,
    /// A socket that was opened already, listening or connected
    #[arg(long, value_name = "N")]
    fd: Option<i32>,
    #[command(flatten)]
    access: SocketArgs,
    /// The tap or macvtap; made if it is not there
    #[arg(long, value_name = "NAME", required_unless_present = "tap_fds", conflicts_with = "tap_fds")]
    tap: Option<String>,
    /// Queues of one tap that were opened already, with IFF_VNET_HDR
    #[arg(long, value_name = "A:B:..", value_delimiter = ':')]
    tap_fds: Vec<i32>,
    /// Queue pairs, with a thread each: 1 to 128 (QEMU's `queues=` may be less). With --tap-fds as many as descriptors
    #[arg(long, value_name = "N", conflicts_with = "tap_fds")]
    queues: Option<usize>,
    /// The tap's MTU is set to this
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(68..), conflicts_with = "tap_fds")]
    mtu: Option<u16>,
    /// What the guest sends leaves by this interface, from the guest's memory (AF_XDP); what it receives comes by the tap
    #[arg(long, value_name = "IF")]
    af_xdp: Option<String>,
    /// AF_XDP sockets that were opened already, not bound: one for each pair
    #[arg(long, value_name = "A:B:..", value_delimiter = ':', requires = "af_xdp")]
    xsk_fds: Vec<i32>,
    /// The interface's queue that the first pair sends by; the others take the next ones
    #[arg(long, value_name = "N", default_value_t = 0, requires = "af_xdp")]
    xsk_queue: u32,
    /// Processors for the threads, one after the other
    #[arg(long, value_name = "N,N,..", value_delimiter = ',')]
    cpus: Vec<usize>,
    /// Wait awake for so many microseconds where requests and answers alternate, instead of being woken; 0: never
    #[arg(long, value_name = "US", default_value_t = 50, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    poll_us: u64,
    /// Where descriptors that are in flight are written down, so that a process that dies loses none of the guest's: a file
    /// (on a tmpfs), or `fd-store`: the service manager's (`FileDescriptorStoreMax=1`)
    #[arg(long, value_name = "FILE|fd-store")]
    state: Option<PathBuf>,
    /// The live upgrade: a process with the same command line that is started while this one runs asks it here for the card,
    /// and has it, with the connection to QEMU and the taps; then this one ends. If it cannot be, this one goes on. The socket
    /// is its owner's alone, and both processes are to be of one user, or root's.
    /// Not with --af-xdp: two processes cannot have one queue of an interface
    #[arg(long, value_name = "SOCKET", conflicts_with = "af_xdp")]
    hand_over: Option<PathBuf>,
    /// QEMU shall not migrate the guest while it has this card, which then keeps no log of what it writes
    #[arg(long)]
    unmigratable: bool,
    /// Whether the card's link and what it has counted travel with its guest (vhost-user's DEVICE_STATE, which stock QEMU
    /// does not ask a network card for); the other host's card has to have the same setting
    #[arg(long, value_name = "ON|OFF", default_value = "off")]
    device_state: Switch,
    #[command(flatten)]
    watch: WatchArgs,
    /// What the queues did as one JSON object, on standard output
    #[arg(long)]
    json: bool,
    /// Print what kind of vhost-user backend this is, as QEMU's vhost-user.json has it; all else is ignored then
    #[arg(long)]
    print_capabilities: bool,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

/// What cannot be confined.
const OPENS: &str = "--af-xdp or --hand-over, which open sockets and map memory while they run";

/// Runs the command.
pub(crate) fn run(args: &NetArgs) -> Result<Exit> {
    let lack = lacks_socket(args.socket.as_deref(), args.fd);
    if let Some(lack) = lack.or_else(|| args.access.lack_of_socket(args.socket.is_some())) {
        console::error(lack);
        return Ok(Exit::Usage);
    }
    let opens = args.af_xdp.is_some() || args.hand_over.is_some();
    if args.sandbox.is_wanted() && opens {
        console::error(&format!("--sandbox on does not go with {OPENS}; leave one of them out"));
        return Ok(Exit::Usage);
    }
    let mut offer = args.hand_over.as_deref().map(hand_over::predecessor).transpose()?.flatten();
    let mut given = offer.as_mut().map(UpgradeOffer::take_device_fds).unwrap_or_default();
    // The first is the socket at which the next successor asks.
    let asked = if given.is_empty() { None } else { Some(given.remove(0)) };
    let taps = match (&offer, &args.tap) {
        (Some(_), _) => taken_over(args, given),
        (None, Some(name)) => Taps::open(name, args.queues.unwrap_or(1)).map_err(Into::into),
        (None, None) => inherited(&args.tap_fds).and_then(|fds| Ok(Taps::from_fds(fds)?)),
    };
    let taps = match taps {
        Ok(taps) => taps,
        Err(error) => {
            if let Some(offer) = offer {
                offer.refuse(&format!("{error:#}"));
            }
            return Err(error);
        }
    };
    if let Some(mtu) = args.mtu {
        taps.set_mtu(mtu)?;
    }
    let options = Options {
        cpus: args.cpus.clone(),
        busy_poll: Duration::from_micros(args.poll_us),
        unmigratable: args.unmigratable,
        device_state: args.device_state == Switch::On,
    };
    let net = Arc::new(Net::with_xdp(taps, xdp(args)?, options));
    let device: Arc<dyn Device> = net.clone();
    let (service, record) = match offer {
        Some(offer) => offer.accept(&device, |listener| listener.map(|fd| adopted(args, fd)))?,
        None => (Service::new(frontends(args)?), state::record(args.state.as_deref(), device.queue_count())?),
    };
    let wishes = Wishes::new()?;
    let successors =
        args.hand_over.as_deref().map(|path| Successors::listen(path, asked, &wishes)).transpose()?;
    let notifier = Notifier::from_environment();
    let mut sandbox = confinement(args, opens);
    let quits = wishes.clone();
    let _watched = args.watch.devices(vec![card(&net)], move || quits.quit())?;
    watch_signals(&net, &wishes, args.json)?;
    // All is open, and no thread that hears a guest runs yet.
    sandbox.iter_mut().for_each(Confinement::finish);
    notifier.ready(&format!("a network card on {}", net.taps().name()));
    let own: Vec<_> = net.taps().queues().iter().map(AsFd::as_fd).collect();
    let stays = || net.taps().reattach();
    let outcome = hand_over::serve(service, (&device, &own), &record, (&wishes, successors), stays);
    notifier.stopping();
    tell(&net, args.json);
    if let Ended::HandedOver = outcome? {
        tracing::info!("another process has the card now");
    }
    Ok(Exit::Done)
}

/// The first step of the sandbox, unless this process goes on to open things.
fn confinement(args: &NetArgs, opens: bool) -> Option<Confinement> {
    if opens {
        args.sandbox.cannot_confine(OPENS);
        return None;
    }
    let mut policy = Policy::default();
    args.socket.iter().for_each(|path| policy.removes(path));
    args.watch.allow(&mut policy);
    Some(args.sandbox.begin(&policy))
}

/// The taps of the process before, if they are those that are asked for.
fn taken_over(args: &NetArgs, fds: Vec<OwnedFd>) -> Result<Taps> {
    let taps = Taps::from_fds(fds)?;
    let (name, queues) = (taps.name(), taps.queues().len());
    if let Some(wanted) = args.tap.as_deref().filter(|wanted| *wanted != name) {
        anyhow::bail!("the process that runs has the tap {name}, this one is to have {wanted}");
    }
    if args.tap.is_some() && args.queues.unwrap_or(1) != queues {
        let wanted = args.queues.unwrap_or(1);
        anyhow::bail!("the process that runs has {queues} queue pairs, this one is to have {wanted}");
    }
    Ok(taps)
}

fn frontends(args: &NetArgs) -> Result<Frontends> {
    match (&args.socket, args.fd) {
        (Some(path), _) => Ok(Frontends::Listen(args.access.listen(path)?)),
        (None, Some(number)) => {
            let fd = inherited(&[number])?.pop().context("one descriptor")?;
            Ok(Frontends::from_fd(fd)?)
        }
        (None, None) => Frontends::from_service_manager()?.context(NOT_PASSED),
    }
}

/// The socket on which the process before listened.
fn adopted(args: &NetArgs, fd: OwnedFd) -> Frontends {
    match &args.socket {
        Some(path) => Frontends::Listen(Listener::adopt(fd, path)),
        None => Frontends::Inherited(fd),
    }
}

/// What there is to transmit by beside the tap.
fn xdp(args: &NetArgs) -> Result<Option<Xdp>> {
    let Some(name) = &args.af_xdp else { return Ok(None) };
    let given = if args.xsk_fds.is_empty() { None } else { Some(inherited(&args.xsk_fds)?) };
    Ok(Some(Xdp::new(name, args.xsk_queue, given)?))
}

fn inherited(numbers: &[i32]) -> Result<Vec<OwnedFd>> {
    let mut known = numbers.to_vec();
    known.sort_unstable();
    if let Some(pair) = known.windows(2).find(|pair| pair[0] == pair[1]) {
        anyhow::bail!("descriptor {} is given twice; each queue needs one of its own", pair[0]);
    }
    if let Some(number) = known.first().filter(|number| **number <= 2) {
        anyhow::bail!("descriptor {number} is not one to give away: standard input, output and error stay");
    }
    let take = |number: &i32| {
        towline_channel::take_over(*number).with_context(|| {
            format!("descriptor {number} is not open in this process; was it inherited (not close-on-exec)?")
        })
    };
    numbers.iter().map(take).collect()
}

fn watch_signals(net: &Arc<Net>, wishes: &Wishes, json: bool) -> Result<()> {
    console::start();
    let watched = ending().into_iter().chain([SIGUSR1]);
    let mut signals = Signals::new(watched).context("signals cannot be caught")?;
    let (net, wishes) = (Arc::clone(net), wishes.clone());
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            match signal {
                SIGUSR1 => tell(&net, json),
                _ => wishes.quit(),
            }
        }
    })?;
    Ok(())
}

/// Says what each queue did so far.
fn tell(net: &Net, json: bool) {
    let pairs = net.statistics();
    if json {
        let pairs: Vec<Value> = pairs
            .iter()
            .zip(net.transmit_modes())
            .map(|([receive, transmit], mode)| {
                let mut transmit = object(transmit);
                transmit["mode"] = mode.name().into();
                json!({ "rx": object(receive), "tx": transmit })
            })
            .collect();
        let event = json!({ "event": "statistics", "tap": net.taps().name(), "pairs": pairs });
        console::print(Keep::Limited, &event.to_string());
        return;
    }
    for (index, pair) in pairs.iter().enumerate() {
        for (way, queue) in ["rx", "tx"].into_iter().zip(pair) {
            console::notice(&format!("net {} {way} {index}: {}", net.taps().name(), line(queue)));
        }
        if net.uses_xdp() {
            let (transmit, mode) = (&pair[1], net.transmit_modes()[index]);
            console::notice(&format!(
                "net {} tx {index}: {} now; {} frames read by the device, {} by reference, {} pending",
                net.taps().name(),
                mode.name(),
                transmit.zero_copy,
                transmit.referenced,
                transmit.pending
            ));
        }
    }
}

fn object(queue: &QueueStatistics) -> Value {
    let drops = DropReason::ALL.map(|reason| (reason.name().to_owned(), queue.dropped(reason).into()));
    json!({
        "packets": queue.packets,
        "bytes": queue.bytes,
        "batches": queue.batches,
        "notifications": queue.notifications,
        "notifications-suppressed": queue.notifications_suppressed,
        "copied": queue.copied,
        "zero-copy": queue.zero_copy,
        "referenced": queue.referenced,
        "pending": queue.pending,
        "drops": Value::Object(drops.into_iter().collect()),
    })
}

fn line(queue: &QueueStatistics) -> String {
    let drops = DropReason::ALL.map(|reason| (reason, queue.dropped(reason)));
    let drops: Vec<String> = drops
        .iter()
        .filter(|(_, count)| *count > 0)
        .map(|(reason, count)| format!(", {count} dropped ({})", reason.name()))
        .collect();
    format!(
        "{} packets, {} bytes, {} batches, {} notifications sent and {} suppressed, {} copied{}",
        queue.packets,
        queue.bytes,
        queue.batches,
        queue.notifications,
        queue.notifications_suppressed,
        queue.copied,
        drops.concat()
    )
}
