//! `towline vsock`: vsock devices of one guest or several, each on separate threads.

mod connect;

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use towline_channel::Cancel;
use towline_vhost_user::FrontendSource;
use towline_vsock::{ConnectionLimits, ForwardingRule, HostAddress, LocalGuests, Settings, Vsock};

use crate::args::{GuestSpec, VsockArgs, VsockCommand, read_guests};
use crate::console;
use crate::exit::Exit;
use crate::notify::Notifier;
use crate::observability::guest;
use crate::sandbox::Policy;
use crate::serve::{DeviceServer, serve_all};
use crate::signals::{SignalEffects, cancel_on_signals, report_on_signal};
use crate::state;

const SIGNAL_EFFECTS: SignalEffects = SignalEffects {
    first: "stopping; the connections of the guests are closed",
    second: Some("without statistics, and its sockets remain"),
};

/// Runs the command.
pub(crate) fn run(args: &VsockArgs) -> Result<Exit> {
    if let Some(VsockCommand::Connect(args)) = &args.command {
        return connect::run(args);
    }
    let descriptors = towline_vsock::raise_descriptor_limit();
    let local_guests = Arc::new(LocalGuests::default());
    let (mut devices, mut served) = (Vec::new(), Vec::new());
    let mut policy = Policy::default();
    let guests = guests(args)?;
    // The guests share the descriptors of this process.
    let limits = ConnectionLimits { memory: args.memory_limit, ..ConnectionLimits::default() }
        .within_descriptors(descriptors, guests.len());
    for (guest, frontends) in guests {
        extend_policy(&mut policy, &guest);
        let cid = guest.cid;
        let record = state::open_in_flight_record(guest.state.as_deref(), towline_vsock::QUEUES)
            .with_context(|| format!("guest {cid}"))?;
        let settings = Settings {
            cid,
            uds: guest.uds,
            uds_seqpacket: guest.uds_seqpacket,
            rules: guest.forward,
            groups: guest.group,
            limits,
            busy_poll: Duration::from_micros(args.poll_us),
        };
        let device = Arc::new(Vsock::new(settings, &local_guests)?);
        devices.push((cid, Arc::clone(&device)));
        served.push(DeviceServer { name: format!("guest {cid}"), device, frontends, record });
    }
    args.observability.extend_policy(&mut policy);
    let mut sandbox = args.sandbox.begin(policy);
    let cancel = cancel_on_signals(SIGNAL_EFFECTS)?;
    let guests = devices.iter().map(|(cid, device)| guest(*cid, device)).collect();
    let token = cancel.clone();
    let _observers = args.observability.of_devices(guests, move || token.cancel())?;
    // Every listener is open, and no thread reads guest input yet.
    let notifier = Notifier::from_environment();
    sandbox.finish();
    let reported: Vec<_> = devices.iter().map(|(cid, device)| (*cid, Arc::downgrade(device))).collect();
    report_on_signal(move || {
        let live = reported.iter().filter_map(|(cid, device)| Some((cid, device.upgrade()?)));
        live.for_each(|(cid, device)| print(*cid, &device));
    })?;
    notifier.ready(&format!("guests: {}", devices.len()));
    let ended = Cancel::new()?;
    serve_unconnected(&devices, &ended)?;
    let result = serve_all(served, &cancel);
    ended.cancel();
    notifier.stopping();
    devices.iter().for_each(|(cid, device)| print(*cid, device));
    result.map(|()| Exit::Done)
}

/// Permits what this guest's device does after its start.
pub(crate) fn extend_policy(policy: &mut Policy, guest: &GuestSpec) {
    if !guest.socket.as_os_str().is_empty() {
        policy.removes(&guest.socket);
    }
    if guest.uds.is_some() || guest.uds_seqpacket.is_some() {
        policy.connects_unix = true;
    }
    guest.uds.iter().chain(&guest.uds_seqpacket).for_each(|path| policy.removes(path));
    for rule in &guest.forward {
        match rule {
            ForwardingRule::Connect { to: HostAddress::Tcp(address), .. } => {
                policy.connect.add(address.port());
            }
            ForwardingRule::Connect { to: HostAddress::Unix(_), .. } | ForwardingRule::PeerGuest { .. } => {
                policy.connects_unix = true;
            }
            ForwardingRule::Connect { to: HostAddress::Vsock { .. }, .. } => policy.connects_vsock = true,
            ForwardingRule::Listen { from: HostAddress::Unix(path), .. } => policy.removes(path),
            ForwardingRule::Listen { from: HostAddress::Tcp(_) | HostAddress::Vsock { .. }, .. } => {}
        }
    }
}

/// Returns the guests of the command line and the file, with listening sockets.
fn guests(args: &VsockArgs) -> Result<Vec<(GuestSpec, FrontendSource)>> {
    let mut many = args.guest.clone();
    if let Some(path) = &args.config {
        many.extend(read_guests(path)?);
    }
    if many.len() > 1 && many.iter().any(|guest| guest.state.as_deref() == Some(Path::new(state::STORE))) {
        bail!(
            "state=fd-store: the service manager stores one record, and there are {} guests: name a file for each",
            many.len()
        );
    }
    if many.is_empty() {
        let frontends = args.access.frontends(args.socket.as_deref(), args.fd)?;
        let guest = GuestSpec {
            cid: args.cid.context("--cid is required")?,
            socket: args.socket.clone().unwrap_or_default(),
            uds: args.uds.clone(),
            uds_seqpacket: args.uds_seqpacket.clone(),
            forward: args.forward.clone(),
            state: args.state.clone(),
            ..GuestSpec::default()
        };
        return Ok(vec![(guest, frontends)]);
    }
    let listening = many.into_iter().map(|guest| {
        let frontends = args.access.listen(&guest.socket)?;
        Ok((guest, frontends))
    });
    listening.collect()
}

/// Prints the statistics of a guest's device.
fn print(cid: u64, device: &Vsock) {
    console::notice(&format!("cid={cid} {}", device.report()));
}

/// Serves clients that come while a guest has no frontend, on a thread for each guest, until the token is
/// cancelled.
fn serve_unconnected(devices: &[(u64, Arc<Vsock>)], ended: &Cancel) -> Result<()> {
    for (cid, device) in devices {
        let (cid, device, ended) = (*cid, Arc::clone(device), ended.clone());
        let serve = move || {
            if let Err(error) = device.serve_unconnected(&ended) {
                tracing::warn!(%error, cid, "clients that come before a frontend wait until there is one");
            }
        };
        thread::Builder::new().name(format!("unconnected-{cid}")).spawn(serve)?;
    }
    Ok(())
}
