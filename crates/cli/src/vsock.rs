//! `towline vsock`: devices for one guest or many, each on threads of its own.

mod guest;

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;
use towline_channel::Cancel;
use towline_vhost_user::{Device, Frontends, InFlightRecord, ServeError, Service};
use towline_vsock::{HostAddress, Limits, LocalGuests, Rule, Settings, Vsock, guest_cid};

pub(crate) use self::guest::Guest;
use crate::args::ZeroCopy;
use crate::backend::{NOT_PASSED, lacks_socket};
use crate::console::{self, Keep};
use crate::notify::Notifier;
use crate::sandbox::{Policy, SandboxArgs};
use crate::signals::cancel_on_signals;
use crate::sockets::SocketArgs;
use crate::units::bytes;
use crate::watch::{WatchArgs, guest};
use crate::{Exit, state};

/// Connect a guest's vsock with sockets of this host (a vhost-user device)
///
/// Firecracker's convention over Unix sockets: who connects to the --uds path says `CONNECT PORT`, and hears `OK PORT` when
/// the guest has accepted; a guest that connects to port PORT of the host (context 2) gets the socket at the path
/// `UDS_PORT`. Both ways of a connection end each on its own. What has no rule is refused.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Rules (--forward), numeric addresses only:
  guest:PORT=tcp:ADDRESS:PORT    the guest's connections to the host's PORT go there
  guest:PORT=unix:PATH           the same, to a Unix socket
  guest:PORT=vsock:CID:PORT      the same, to a port of the host's own vsock, where it has one
  tcp:ADDRESS:PORT=guest:PORT    listen there; who connects gets the guest's PORT
  unix:PATH=guest:PORT           the same, at a Unix socket
  vsock:PORT=guest:PORT          the same, at a port of the host's own vsock
  cid:N=uds:PATH                 the guest's connections to guest N go to its device, whose --uds is PATH

Examples:
  One guest, by Firecracker's convention:
    towline vsock --socket /run/vm/vsock.sock --cid 3 --uds /run/vm/v.sock
    qemu-system-x86_64 ... -object memory-backend-memfd,id=mem,size=1G,share=on -machine q35,memory-backend=mem \\
      -chardev socket,id=vsock,path=/run/vm/vsock.sock -device vhost-user-vsock-pci,chardev=vsock
    socat - UNIX-CONNECT:/run/vm/v.sock      (then type: CONNECT 22)
  The guest's ssh at a TCP port, and a service of the host in the guest:
    towline vsock --socket S --cid 3 --forward tcp:127.0.0.1:2222=guest:22 --forward guest:80=tcp:127.0.0.1:8080
  Two guests that may also reach each other by their contexts:
    towline vsock --guest cid=3,socket=a.sock,uds=a.v,group=lab --guest cid=4,socket=b.sock,uds=b.v,group=lab
  The same from a file: towline vsock --config guests.toml
    [[guest]]                               one for each guest, with the keys of --guest
    cid = 3
    socket = \"a.sock\"
    uds = \"a.v\"
    forward = [\"guest:80=tcp:127.0.0.1:8080\"]
    group = [\"lab\"]
  Statistics, of each guest and each connection: kill -USR1 PID; they are also printed at the end.")]
pub(crate) struct VsockArgs {
    /// Listen at this path for QEMU (or another VMM). Without it and --fd: at the socket of a service manager
    #[arg(long, value_name = "PATH", visible_alias = "socket-path", conflicts_with_all = ["fd", "guest", "config"])]
    socket: Option<PathBuf>,
    #[command(flatten)]
    access: SocketArgs,
    /// An open socket instead, listening or connected
    #[arg(long, value_name = "N", conflicts_with_all = ["guest", "config"])]
    fd: Option<i32>,
    /// The guest's context: above 2, and not another guest's
    #[arg(long, value_name = "N", value_parser = guest_cid, required_unless_present_any = ["guest", "config"],
          conflicts_with_all = ["guest", "config"])]
    cid: Option<u64>,
    /// Listen here for those who say CONNECT; and where, with _PORT, the guest's connections go
    #[arg(long, value_name = "PATH", conflicts_with_all = ["guest", "config"])]
    uds: Option<PathBuf>,
    /// The same for sockets that keep messages apart (SOCK_SEQPACKET)
    #[arg(long, value_name = "PATH", conflicts_with_all = ["guest", "config"])]
    uds_seqpacket: Option<PathBuf>,
    /// Who else may be connected with whom; see below
    #[arg(long, value_name = "RULE", conflicts_with_all = ["guest", "config"])]
    forward: Vec<Rule>,
    /// Record descriptors in flight in this file (on a tmpfs), so that a process that is started after this one has died completes
    /// each of them once; or `fd-store`: in the service manager's store (`FileDescriptorStoreMax=1`)
    #[arg(long, value_name = "FILE|fd-store", conflicts_with_all = ["guest", "config"])]
    state: Option<PathBuf>,
    /// One of several guests: cid=N,socket=PATH and, as above, uds=, uds-seqpacket=, forward=, group=NAME, state=, as often as
    /// needed
    #[arg(long, value_name = "KEY=VALUE,...")]
    guest: Vec<Guest>,
    /// The guests of a TOML file, beside those of --guest; see below
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The most bytes that one connection may have waiting for its host side (suffixes K, M, G)
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "1M")]
    buf_alloc: u64,
    /// Maximum memory of all connections of a guest together, with their bookkeeping
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "512M")]
    memory_limit: u64,
    /// Maximum connections of a guest. Default: 16384, or what a guest's share of the descriptors of the process allows
    #[arg(long, value_name = "N")]
    connections_limit: Option<usize>,
    /// Send packets of 16 KiB and more to TCP without a copy (MSG_ZEROCOPY). auto: not to addresses to which the kernel
    /// copies them all the same
    #[arg(long, value_name = "AUTO|ON|OFF", default_value = "auto")]
    zero_copy_send: ZeroCopy,
    /// Wait awake for so long where requests and answers alternate, instead of being woken; 0: never
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
    poll_us: u64,
    /// QEMU shall not migrate a guest while it has this device
    #[arg(long)]
    unmigratable: bool,
    #[command(flatten)]
    watch: WatchArgs,
    /// Print no statistics at the end
    #[arg(long)]
    quiet: bool,
    /// Print what kind of vhost-user backend this is, as QEMU's vhost-user.json has it; all else is ignored then
    #[arg(long)]
    print_capabilities: bool,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

/// A guest's device, and where its frontend comes from.
struct Served {
    cid: u64,
    device: Arc<Vsock>,
    frontends: Frontends,
    record: InFlightRecord,
}

/// How long to wait for descriptors or memory that the process lacks.
const RETRY_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

pub(crate) fn run(args: &VsockArgs) -> Result<Exit> {
    let is_one = args.guest.is_empty() && args.config.is_none();
    let lack = if is_one { lacks_socket(args.socket.as_deref(), args.fd) } else { None };
    if let Some(lack) = lack.or_else(|| args.access.lack_of_socket(!is_one || args.socket.is_some())) {
        console::error(lack);
        return Ok(Exit::Usage);
    }
    let descriptors = towline_vsock::raise_descriptor_limit();
    let local_guests = Arc::new(LocalGuests::default());
    let mut served = Vec::new();
    let mut policy = Policy::default();
    let guests = guests(args)?;
    let limits = limits(args, descriptors, guests.len())?;
    for (guest, frontends) in guests {
        allow(&mut policy, &guest);
        let record = record(&guest)?;
        let cid = guest.cid;
        let settings = Settings {
            cid,
            uds: guest.uds,
            uds_seqpacket: guest.uds_seqpacket,
            rules: guest.forward,
            groups: guest.group,
            limits,
            zero_copy_send: args.zero_copy_send.into(),
            busy_poll: Duration::from_micros(args.poll_us),
            unmigratable: args.unmigratable,
        };
        let device = Arc::new(Vsock::new(settings, &local_guests)?);
        served.push(Served { cid, device, frontends, record });
    }
    args.watch.allow(&mut policy);
    let mut sandbox = args.sandbox.begin(&policy);
    let cancel = cancel_on_signals("the guests' connections end")?;
    let devices: Vec<(u64, Arc<Vsock>)> =
        served.iter().map(|served| (served.cid, Arc::clone(&served.device))).collect();
    let guests = devices.iter().map(|(cid, device)| guest(*cid, device)).collect();
    let quits = cancel.clone();
    let _watched = args.watch.devices(guests, move || quits.cancel())?;
    // All that listens is open, and no thread that hears a guest runs yet.
    let notifier = Notifier::from_environment();
    sandbox.finish();
    report_on_signal(&devices)?;
    notifier.ready(&format!("guests: {}", devices.len()));
    let done = serve_all(served, &cancel);
    notifier.stopping();
    if !args.quiet {
        devices.iter().for_each(|(cid, device)| print(*cid, device));
    }
    done.map(|()| Exit::Done)
}

/// Lets the process do what this guest's device does later.
pub(crate) fn allow(policy: &mut Policy, guest: &Guest) {
    if !guest.socket.as_os_str().is_empty() {
        policy.removes(&guest.socket);
    }
    if guest.uds.is_some() || guest.uds_seqpacket.is_some() {
        policy.connects_unix();
    }
    guest.uds.iter().chain(&guest.uds_seqpacket).for_each(|path| policy.removes(path));
    for rule in &guest.forward {
        match rule {
            Rule::Connect { to: HostAddress::Tcp(address), .. } => policy.connects_tcp(address.port()),
            Rule::Connect { to: HostAddress::Unix(_), .. } | Rule::PeerGuest { .. } => policy.connects_unix(),
            Rule::Connect { to: HostAddress::Vsock { .. }, .. } => policy.connects_vsock(),
            Rule::Listen { from: HostAddress::Unix(path), .. } => policy.removes(path),
            Rule::Listen { .. } => {}
        }
    }
}

/// The limits of each of the guests, which share the descriptors of this process.
fn limits(args: &VsockArgs, descriptors: u64, guests: usize) -> Result<Limits> {
    let most = u64::from(towline_vsock::credit::WINDOW_MAX);
    let buf_alloc =
        u32::try_from(args.buf_alloc).ok().filter(|bytes| (4096..=most).contains(&u64::from(*bytes)));
    let buf_alloc = buf_alloc
        .with_context(|| format!("--buf-alloc {}: expected 4096 to {most} bytes", args.buf_alloc))?;
    let wanted = Limits { buf_alloc, memory: args.memory_limit, ..Limits::default() };
    let wanted = Limits { connections: args.connections_limit.unwrap_or(wanted.connections), ..wanted };
    let limits = wanted.within_descriptors(descriptors, guests);
    if args.connections_limit.is_some_and(|connections| connections > limits.connections) {
        tracing::warn!(
            wanted = wanted.connections,
            connections = limits.connections,
            descriptors,
            guests,
            "--connections-limit is more than a guest's share of the descriptors of this process; raise its hard limit \
             (LimitNOFILE=), or serve fewer guests with it"
        );
    }
    Ok(limits)
}

/// Where the descriptors that are in flight with a guest's device are recorded.
fn record(guest: &Guest) -> Result<InFlightRecord> {
    state::record(guest.state.as_deref(), towline_vsock::QUEUES)
        .with_context(|| format!("the guest with the context {}", guest.cid))
}

fn guests(args: &VsockArgs) -> Result<Vec<(Guest, Frontends)>> {
    let listen = |path: &PathBuf| -> Result<Frontends> {
        let listener = args.access.listen(path);
        Ok(Frontends::Listen(listener.with_context(|| format!("--socket {}", path.display()))?))
    };
    let mut many = args.guest.clone();
    if let Some(path) = &args.config {
        many.extend(guest::read(path)?);
    }
    if many.len() > 1 && many.iter().any(|guest| guest.state.as_deref() == Some(Path::new(state::STORE))) {
        bail!(
            "state=fd-store: the service manager's store has one record, and {} guests are to be served; name a \
               file for each",
            many.len()
        );
    }
    if !many.is_empty() {
        let listening = many.into_iter().map(|guest| {
            let frontends = listen(&guest.socket)?;
            Ok((guest, frontends))
        });
        return listening.collect();
    }
    let frontends = match (&args.socket, args.fd) {
        (Some(path), _) => listen(path)?,
        (None, Some(fd)) => Frontends::from_fd(take_over(fd)?)?,
        (None, None) => Frontends::from_service_manager()?.context(NOT_PASSED)?,
    };
    let guest = Guest {
        cid: args.cid.context("--cid is needed")?,
        socket: args.socket.clone().unwrap_or_default(),
        uds: args.uds.clone(),
        uds_seqpacket: args.uds_seqpacket.clone(),
        forward: args.forward.clone(),
        state: args.state.clone(),
        ..Guest::default()
    };
    Ok(vec![(guest, frontends)])
}

fn take_over(fd: i32) -> Result<OwnedFd> {
    towline_channel::inherit(fd).with_context(|| format!("--fd {fd}: not open here"))
}

/// Serves each guest on a thread of its own, until cancelled or until none of them can be served any more. One that fails ends
/// alone; the first failure is the result.
fn serve_all(served: Vec<Served>, cancel: &Cancel) -> Result<()> {
    let guests = served.into_iter().map(|served| {
        let (cid, cancel) = (served.cid, cancel.clone());
        (cid, move || serve(served, &cancel))
    });
    run_all(guests.collect(), cancel)
}

fn run_all(guests: Vec<(u64, impl FnOnce() -> Result<()> + Send + 'static)>, cancel: &Cancel) -> Result<()> {
    let run = |(cid, serve): (u64, _)| {
        let cancel = cancel.clone();
        let thread = move || {
            let done =
                catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|_| Err(anyhow!("its thread panicked")));
            if cancel.is_cancelled() {
                return Ok(());
            }
            let done = done.with_context(|| format!("the guest with the context {cid}"));
            if let Err(error) = &done {
                tracing::error!(error = %format!("{error:#}"), "a guest is served no more; others go on");
            }
            done
        };
        thread::Builder::new().name(format!("vsock-{cid}")).spawn(thread)
    };
    let threads: Vec<_> =
        guests.into_iter().map(run).collect::<Result<_, _>>().inspect_err(|_| cancel.cancel())?;
    let mut outcome = Ok(());
    for thread in threads {
        let done = thread.join().map_err(|_| anyhow!("a guest's thread panicked")).and_then(|done| done);
        outcome = outcome.and(done);
    }
    outcome
}

/// Prints what a guest's device did so far.
fn print(cid: u64, device: &Vsock) {
    console::print(Keep::Limited, &format!("cid={cid} {}", device.report()));
}

/// Serves one guest's frontends until cancelled. A process that has no descriptor or memory left may have some later.
fn serve(served: Served, cancel: &Cancel) -> Result<()> {
    let Served { cid, device, frontends, record } = served;
    let device: Arc<dyn Device> = device;
    let mut service = Service::new(frontends);
    let mut noted = false;
    loop {
        match service.serve(&device, &record, cancel) {
            _ if cancel.is_cancelled() => return Ok(()),
            Err(error) if is_shortage(&error) => {
                if !std::mem::replace(&mut noted, true) {
                    tracing::warn!(%error, cid, "no frontend can connect until the process has descriptors and memory");
                }
                wait(cancel);
            }
            done => return done.with_context(|| format!("the guest with the context {cid}")),
        }
    }
}

/// Waits before the next attempt, or until cancelled.
fn wait(cancel: &Cancel) {
    if let Err(errno) = poll(&mut [PollFd::new(cancel, PollFlags::IN)], Some(&RETRY_INTERVAL)) {
        tracing::debug!(%errno, "poll");
    }
}

/// Whether the process, or the machine, lacks descriptors or memory for now.
fn is_shortage(error: &ServeError) -> bool {
    let errno = match error {
        ServeError::Channel(towline_channel::Error::Io { source, .. }) => source.raw_os_error(),
        ServeError::Descriptor(errno) => errno.raw_os_error(),
        _ => None,
    };
    errno.is_some_and(|errno| [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM].contains(&errno))
}

/// The thread that waits for signals never ends, and so keeps no device: with a device its sockets' files go.
fn report_on_signal(devices: &[(u64, Arc<Vsock>)]) -> Result<()> {
    let mut signals = Signals::new([SIGUSR1]).context("signals cannot be caught")?;
    let devices: Vec<_> = devices.iter().map(|(cid, device)| (*cid, Arc::downgrade(device))).collect();
    thread::spawn(move || {
        for _ in signals.forever() {
            let there = devices.iter().filter_map(|(cid, device)| Some((cid, device.upgrade()?)));
            there.for_each(|(cid, device)| print(*cid, &device));
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    type Guest = Box<dyn FnOnce() -> Result<()> + Send>;

    #[test]
    fn a_guest_that_fails_or_panics_does_not_end_the_others() {
        let cancel = Cancel::new().unwrap();
        let (ended, others) = channel();
        let fails = ended.clone();
        let stays = move || {
            for _ in 0..2 {
                others.recv_timeout(Duration::from_secs(60))?;
            }
            Ok(())
        };
        let guests: Vec<(u64, Guest)> = vec![
            (3, Box::new(move || fails.send(()).map_err(Into::into).and(Err(anyhow!("no descriptor"))))),
            (4, Box::new(move || ended.send(()).map(|()| panic!("a bug")).map_err(Into::into))),
            (5, Box::new(stays)),
        ];
        let error = run_all(guests, &cancel).unwrap_err();
        assert_eq!(format!("{error:#}"), "the guest with the context 3: no descriptor");
        assert!(!cancel.is_cancelled());
    }
}
