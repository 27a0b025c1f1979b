//! `towline vsock`: devices for one guest or many, each on threads of its own.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, anyhow, bail};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;
use towline_channel::Cancel;
use towline_vhost_user::{Address, Device, Frontends, Listener};
use towline_vsock::{Limits, Rule, Settings, Siblings, Vsock, guest_cid};

use crate::Exit;
use crate::signals::cancel_on_signals;
use crate::units::bytes;
use crate::watch::{WatchArgs, guest};

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
  tcp:ADDRESS:PORT=guest:PORT    listen there; who connects gets the guest's PORT
  unix:PATH=guest:PORT           the same, at a Unix socket
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
  Statistics, of each guest and each connection: kill -USR1 PID; they are also printed at the end.")]
pub(crate) struct VsockArgs {
    /// Listen at this path for QEMU (or another VMM)
    #[arg(long, value_name = "PATH", conflicts_with_all = ["fd", "guest"], required_unless_present_any = ["fd", "guest"])]
    socket: Option<PathBuf>,
    /// An open socket instead, listening or connected
    #[arg(long, value_name = "N", conflicts_with = "guest")]
    fd: Option<i32>,
    /// The guest's context: above 2, and not another guest's
    #[arg(long, value_name = "N", value_parser = guest_cid, required_unless_present = "guest")]
    cid: Option<u64>,
    /// Listen here for those who say CONNECT; and where, with _PORT, the guest's connections go
    #[arg(long, value_name = "PATH", conflicts_with = "guest")]
    uds: Option<PathBuf>,
    /// The same for sockets that keep messages apart (SOCK_SEQPACKET)
    #[arg(long, value_name = "PATH", conflicts_with = "guest")]
    uds_seqpacket: Option<PathBuf>,
    /// Who else may be connected with whom; see below
    #[arg(long, value_name = "RULE", conflicts_with = "guest")]
    forward: Vec<Rule>,
    /// One of several guests: cid=N,socket=PATH and, as above, uds=, uds-seqpacket=, forward=, group=NAME, as often as needed
    #[arg(long, value_name = "KEY=VALUE,...")]
    guest: Vec<Guest>,
    /// The most bytes that one connection may have waiting for its host side (suffixes K, M, G)
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "1M")]
    buf_alloc: u64,
    /// The most bytes that all connections of a guest together may have waiting
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "512M")]
    memory_limit: u64,
    /// The most connections that a guest may have
    #[arg(long, value_name = "N", default_value_t = Limits::default().connections)]
    connections_limit: usize,
    /// QEMU shall not migrate a guest while it has this device
    #[arg(long)]
    unmigratable: bool,
    #[command(flatten)]
    watch: WatchArgs,
    /// Print no statistics at the end
    #[arg(long)]
    quiet: bool,
}

/// What `--guest` says.
#[derive(Debug, Clone, Default)]
struct Guest {
    cid: u64,
    socket: PathBuf,
    uds: Option<PathBuf>,
    uds_seqpacket: Option<PathBuf>,
    forward: Vec<Rule>,
    group: Vec<String>,
}

impl FromStr for Guest {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut guest = Self::default();
        for part in text.split(',') {
            let (key, value) = part.split_once('=').with_context(|| format!("`{part}` is not KEY=VALUE"))?;
            match key {
                "cid" => guest.cid = guest_cid(value)?,
                "socket" => guest.socket = value.into(),
                "uds" => guest.uds = Some(value.into()),
                "uds-seqpacket" => guest.uds_seqpacket = Some(value.into()),
                "forward" => guest.forward.push(value.parse()?),
                "group" => guest.group.push(value.to_owned()),
                _ => bail!("`{key}` is not one of cid, socket, uds, uds-seqpacket, forward, group"),
            }
        }
        if guest.cid == 0 || guest.socket.as_os_str().is_empty() {
            bail!("`{text}` needs cid= and socket=");
        }
        Ok(guest)
    }
}

/// A guest's device, and where its frontend comes from.
struct Served {
    cid: u64,
    device: Arc<Vsock>,
    frontends: Frontends,
}

pub(crate) fn run(args: &VsockArgs) -> Result<Exit> {
    let limits = limits(args)?;
    towline_vsock::allow_descriptors();
    let siblings = Arc::new(Siblings::default());
    let mut served = Vec::new();
    for (guest, frontends) in guests(args)? {
        let cid = guest.cid;
        let settings = Settings {
            cid,
            uds: guest.uds,
            uds_seqpacket: guest.uds_seqpacket,
            rules: guest.forward,
            groups: guest.group,
            limits,
            unmigratable: args.unmigratable,
        };
        let device = Arc::new(Vsock::new(settings, &siblings)?);
        served.push(Served { cid, device, frontends });
    }
    let cancel = cancel_on_signals("the guests' connections end")?;
    let devices: Vec<(u64, Arc<Vsock>)> =
        served.iter().map(|served| (served.cid, Arc::clone(&served.device))).collect();
    report_on_signal(devices.clone())?;
    let guests = devices.iter().map(|(cid, device)| guest(*cid, device)).collect();
    let _watched = args.watch.devices(guests, &cancel)?;
    let done = serve_all(served, &cancel);
    if !args.quiet {
        devices.iter().for_each(|(cid, device)| println!("cid={cid} {}", device.report()));
    }
    done.map(|()| Exit::Done)
}

fn limits(args: &VsockArgs) -> Result<Limits> {
    let most = u64::from(towline_vsock::credit::WINDOW_MAX);
    let buf_alloc =
        u32::try_from(args.buf_alloc).ok().filter(|bytes| (4096..=most).contains(&u64::from(*bytes)));
    let buf_alloc = buf_alloc
        .with_context(|| format!("--buf-alloc {}: expected 4096 to {most} bytes", args.buf_alloc))?;
    Ok(Limits { connections: args.connections_limit, buf_alloc, memory: args.memory_limit })
}

fn guests(args: &VsockArgs) -> Result<Vec<(Guest, Frontends)>> {
    let listen = |path: &PathBuf| -> Result<Frontends> {
        let listener = Listener::bind(&Address::Unix(path.clone()));
        Ok(Frontends::Listen(listener.with_context(|| format!("--socket {}", path.display()))?))
    };
    if !args.guest.is_empty() {
        return args.guest.iter().map(|guest| Ok((guest.clone(), listen(&guest.socket)?))).collect();
    }
    let frontends = match (&args.socket, args.fd) {
        (Some(path), _) => listen(path)?,
        (None, Some(fd)) => Frontends::from_fd(take_over(fd)?)?,
        (None, None) => bail!("--socket, --fd or --guest is needed"),
    };
    let guest = Guest {
        cid: args.cid.context("--cid is needed")?,
        uds: args.uds.clone(),
        uds_seqpacket: args.uds_seqpacket.clone(),
        forward: args.forward.clone(),
        ..Guest::default()
    };
    Ok(vec![(guest, frontends)])
}

fn take_over(fd: i32) -> Result<OwnedFd> {
    towline_channel::inherit(fd).with_context(|| format!("--fd {fd}: not open here"))
}

/// Each on its own thread; the first that cannot go on ends all.
fn serve_all(served: Vec<Served>, cancel: &Cancel) -> Result<()> {
    let serve = |Served { cid, device, frontends }: Served| {
        let cancel = cancel.clone();
        let thread = move || {
            let device: Arc<dyn Device> = device;
            let done = frontends.serve(&device, &cancel);
            let wished = cancel.is_cancelled();
            if done.is_err() && !wished {
                cancel.cancel();
            }
            if wished { Ok(()) } else { done.with_context(|| format!("the guest with the context {cid}")) }
        };
        thread::Builder::new().name(format!("vsock-{cid}")).spawn(thread)
    };
    let threads: Vec<_> = served.into_iter().map(serve).collect::<Result<_, _>>()?;
    let mut outcome = Ok(());
    for thread in threads {
        let done = thread.join().map_err(|_| anyhow!("a guest's thread panicked")).and_then(|done| done);
        outcome = outcome.and(done);
    }
    outcome
}

fn report_on_signal(devices: Vec<(u64, Arc<Vsock>)>) -> Result<()> {
    let mut signals = Signals::new([SIGUSR1]).context("signals cannot be caught")?;
    thread::spawn(move || {
        for _ in signals.forever() {
            devices.iter().for_each(|(cid, device)| println!("cid={cid} {}", device.report()));
        }
    });
    Ok(())
}
