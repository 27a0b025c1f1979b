//! Requests of `copy` and `move` from their options. Options that exclude each other are refused here.

use std::path::PathBuf;
use std::time::Duration;

use towline_channel::Address;
use towline_control::check::LANES_DEFAULT;
use towline_control::plan::{
    AfterCopy, CopyRequest, Destination, GenerationUse, PostcopyStart, PostcopySwitch, RequestedPages,
    Source, Task, Throttling, TransferOptions, WritableDisks,
};
use towline_control::remote::Place;
use towline_migration::{Compression, ZeroCopySend};

use crate::args::{CopyArgs, IfNotConverging, MoveArgs, OnOff, StoredSourceArgs, TransferArgs, Via};
use crate::endpoint::{Endpoint, SshEndpoint, memory};

/// Returns the request of a `copy`.
pub(crate) fn of_copy(
    args: &CopyArgs,
    source: &Source,
    destinations: &[Destination],
) -> Result<CopyRequest, String> {
    if let Endpoint::Ssh(end) = &args.destinations[0] {
        check_copy_to_host(args, end)?;
        check_transfer_to_host(&args.transfer, Via::Relay)?;
    }
    if let Endpoint::Ssh(end) = &args.source {
        check_copy_from_host(args, end)?;
        check_transfer_to_host(&args.transfer, Via::Relay)?;
    }
    let base = match &args.base {
        None => None,
        Some(Endpoint::Image(path)) => Some(path.clone()),
        Some(other) => return Err(format!("--base {other}: expected an image")),
    };
    let transfer = transfer_between([&args.source, &args.destinations[0]], &args.transfer);
    let task = if args.live {
        snapshot(&args.transfer, base)?
    } else if args.transfer.postcopy.postcopy {
        if base.is_some() {
            return Err("--base needs an image as DEST".into());
        }
        if args.resume && matches!(source, Source::Qmp(_)) {
            return Err("--resume with --postcopy: the guest would run twice; leave --resume out".into());
        }
        postcopy(&args.transfer, recovered(&args.stored, run(&args.transfer))?)
    } else {
        Task::Copy { transfer, after: after(args, source, destinations)?, base }
    };
    let StoredSourceArgs { verify, stream, .. } = args.stored;
    let request = request(&args.transfer, task);
    let return_path = request.return_path && !is_file(source);
    let is_stored = matches!(source, Source::Qmp(_)) && destinations.iter().all(Destination::is_image);
    if (args.disks.with_disks || args.disks.memory_only) && !(is_stored && (args.resume || args.live)) {
        return Err("--with-disks and --memory-only are for an image of a guest that runs on: from qmp: to a file or a store, with \
                    --resume or --live; leave them out"
            .into());
    }
    let disks = if args.disks.memory_only { WritableDisks::LeftOut } else { WritableDisks::Refused };
    let request = CopyRequest { verify, stream, return_path, disks, ..request };
    destinations.iter().try_for_each(|destination| memory::check(source, destination, &request))?;
    Ok(request)
}

/// Returns the state of the guest at both ends after a `copy`.
fn after(args: &CopyArgs, source: &Source, destinations: &[Destination]) -> Result<AfterCopy, String> {
    if !args.resume || !matches!(source, Source::Qmp(_)) {
        return Ok(AfterCopy::SourcePaused { run: run(&args.transfer) });
    }
    if args.transfer.run && destinations.iter().any(|one| matches!(one, Destination::Qmp(_))) {
        return Err("--resume with --run: the same guest would run twice".into());
    }
    Ok(AfterCopy::SourceResumed)
}

/// Refuses a copy to a place on another host that would make two guests, or has no effect there.
fn check_copy_to_host(args: &CopyArgs, end: &SshEndpoint) -> Result<(), String> {
    match end.place {
        Place::Qmp(_) | Place::Guest(_) => Err(format!(
            "a copy to {end} would be a second guest: use `towline move`, or copy to an image there"
        )),
        _ if args.base.is_some() => Err("--base needs an image of this host as DEST".into()),
        _ if args.live || args.resume => Err(format!(
            "--resume and --live with {end}: its disks would not be kept at that instant; store it on this host first"
        )),
        _ => Ok(()),
    }
}

/// Refuses a copy from a place on another host that is not one of an image to this host.
fn check_copy_from_host(args: &CopyArgs, end: &SshEndpoint) -> Result<(), String> {
    match (&end.place, &args.destinations[0]) {
        (Place::Qmp(_) | Place::Guest(_), _) => Err(format!(
            "{end} as SOURCE: only an image there can be copied (ssh:HOST//FILE, ssh:HOST/STORE); start towline on that host for its guests"
        )),
        (_, to @ (Endpoint::Ssh(_) | Endpoint::Stream(_))) => Err(format!(
            "{end} to {to}: an image of another host is copied to this one; copy it to a file first, or start towline on that host"
        )),
        _ => Ok(()),
    }
}

/// Refuses options that a stream to another host does not have.
fn check_transfer_to_host(args: &TransferArgs, via: Via) -> Result<(), String> {
    let is_compressed = args.compression != Compression::None;
    let text = if args.postcopy.postcopy && via == Via::Relay {
        "--postcopy goes from a QEMU to a QEMU, not through both towlines; leave it out"
    } else if args.tls.tls_creds.is_some() {
        "both hosts make keys for each stream; leave --tls-creds out"
    } else if via == Via::Relay && args.zero_copy_send == ZeroCopySend::On {
        "what goes to another host through both towlines is encrypted, and so copied; leave --zero-copy-send out"
    } else if args.return_path == OnOff::Off {
        "a stream to another host has a return path; leave --return-path out"
    } else if is_compressed && args.multifd_channels == Some(0) {
        "--compression needs lanes (--multifd-channels)"
    } else {
        return Ok(());
    };
    Err(text.into())
}

/// Refuses a move to another host that cannot be switched to postcopy.
fn check_postcopy_to_host(args: &MoveArgs, end: &SshEndpoint) -> Result<(), String> {
    let text = if matches!(end.place, Place::File(_) | Place::Store(_)) {
        format!("postcopy to {end}: an image does not run; leave --postcopy and --if-not-converging out")
    } else if args.via == Via::Relay {
        "--if-not-converging postcopy goes from QEMU to QEMU; leave --via relay out".into()
    } else if args.transfer.postcopy.postcopy_preempt {
        "--postcopy-preempt is for two QEMUs of one host; leave it out".into()
    } else {
        return Ok(());
    };
    Err(text)
}

/// Returns true for a stream in a file, as libvirt stores it, which has no return path.
pub(crate) fn is_file(source: &Source) -> bool {
    matches!(source, Source::Stream(Address::File { .. }))
}

/// Returns the request of a `move`.
pub(crate) fn of_move(args: &MoveArgs, destination: &Endpoint) -> Result<CopyRequest, String> {
    match destination {
        Endpoint::Ssh(end) => {
            check_transfer_to_host(&args.transfer, args.via)?;
            if args.permits_postcopy() {
                check_postcopy_to_host(args, end)?;
            }
            if args.host.with_disks && matches!(end.place, Place::File(_) | Place::Store(_)) {
                return Err(format!("--with-disks with {end}: an image has no disks; leave the option out"));
            }
            if args.via == Via::Direct && matches!(end.place, Place::File(_) | Place::Store(_)) {
                return Err(format!(
                    "--via direct with {end}: no QEMU receives an image; leave the option out"
                ));
            }
            if args.unmanaged && !matches!(end.place, Place::Guest(_)) {
                return Err(format!(
                    "--unmanaged with {end}: a cluster finds the guest by its name; give that, or none"
                ));
            }
        }
        _ if args.host.is_given() || args.unmanaged || args.via != Via::Auto => {
            let text = "--via, --set, --map, --qemu, --trust-command-line, --with-disks, --shared-disks and --unmanaged are for ssh:HOST as DEST; leave them out";
            return Err(text.into());
        }
        _ => {}
    }
    let (run, devices) = (run(&args.transfer), args.device_ctl.clone());
    let task = if let Some(switch) = postcopy_switch(args) {
        if args.detach_vsock {
            let text = match destination {
                Endpoint::Qmp(_) => {
                    "--detach-vsock cannot be used with postcopy: leave --postcopy and --if-not-converging out"
                }
                _ => "--detach-vsock needs a qmp: DEST, where the device is plugged in again",
            };
            return Err(text.into());
        }
        postcopy(&args.transfer, PostcopyStart::Move { run, devices, switch })
    } else {
        let transfer = transfer_between([destination; 2], &args.transfer);
        let throttling = match args.if_not_converging {
            IfNotConverging::Throttle if !args.transfer.throttle => Throttling::IfNotConverging,
            _ => transfer.throttling,
        };
        Task::Move {
            transfer: TransferOptions { throttling, ..transfer },
            run,
            detach_vsock: args.detach_vsock,
            devices,
        }
    };
    let generations = if args.unmanaged { GenerationUse::TakesPart } else { GenerationUse::Refused };
    Ok(CopyRequest { generations, ..request(&args.transfer, task) })
}

/// The moment at which the guest of a move is switched to postcopy, if it may be.
fn postcopy_switch(args: &MoveArgs) -> Option<PostcopySwitch> {
    let permitted = args.if_not_converging == IfNotConverging::Postcopy;
    match args.transfer.postcopy.postcopy {
        true => Some(PostcopySwitch::FirstPass),
        false => permitted.then_some(PostcopySwitch::IfNotConverging),
    }
}

/// Returns the task of `--live`, QEMU's background-snapshot.
fn snapshot(args: &TransferArgs, base: Option<PathBuf>) -> Result<Task, String> {
    let text = if args.multifd_channels.is_some_and(|lanes| lanes > 0) {
        "--live with --multifd-channels: QEMU's background-snapshot has a single channel; leave the option out"
    } else if args.max_bandwidth.is_some() {
        "--live with --max-bandwidth: QEMU sends a background snapshot as fast as it is taken; leave the limit out"
    } else if args.throttle {
        "--live with --throttle: every page is sent once, whatever the guest writes; leave --throttle out"
    } else if args.postcopy.postcopy {
        "--live with --postcopy: an image does not run; leave one of the two out"
    } else {
        return Ok(Task::Snapshot { base });
    };
    Err(text.into())
}

/// Returns the start of a `copy --postcopy`.
fn recovered(stored: &StoredSourceArgs, run: Option<bool>) -> Result<PostcopyStart, String> {
    match (stored.recover, run) {
        (false, run) => Ok(PostcopyStart::Copy { run }),
        (true, None) => Ok(PostcopyStart::Recover),
        (true, Some(_)) => {
            Err("--recover continues with a guest as it is: leave --run and --paused out".into())
        }
    }
}

fn postcopy(args: &TransferArgs, start: PostcopyStart) -> Task {
    Task::Postcopy {
        transfer: transfer(args),
        start,
        requested_pages: if args.postcopy.postcopy_preempt {
            RequestedPages::PreemptChannel
        } else {
            RequestedPages::MainChannel
        },
    }
}

/// As [`transfer`]; both ends are driven, also where one is on another host.
fn transfer_between(ends: [&Endpoint; 2], args: &TransferArgs) -> TransferOptions {
    let transfer = transfer(args);
    let lanes = ends.iter().any(|end| matches!(end, Endpoint::Ssh(_))).then_some(LANES_DEFAULT);
    TransferOptions { multifd_channels: transfer.multifd_channels.or(lanes), ..transfer }
}

fn transfer(args: &TransferArgs) -> TransferOptions {
    let TransferArgs { multifd_channels, max_bandwidth, throttle, .. } = *args;
    let throttling = if throttle { Throttling::Always } else { Throttling::Unchanged };
    TransferOptions { multifd_channels, max_bandwidth, throttling }
}

fn run(args: &TransferArgs) -> Option<bool> {
    (args.run || args.paused).then_some(args.run)
}

fn request(args: &TransferArgs, task: Task) -> CopyRequest {
    CopyRequest {
        compression: args.compression,
        zero_copy_send: args.zero_copy_send,
        tls: args.tls.tls(),
        downtime_limit: Duration::from_millis(args.downtime_limit),
        return_path: args.return_path == OnOff::On,
        overwrite: args.overwrite,
        connect_timeout: args.connect_timeout,
        accept_timeout: args.accept_timeout,
        peer_timeout: args.peer_timeout,
        recover_timeout: args.postcopy.recover_timeout,
        ..CopyRequest::new(task)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Args, Command};

    fn parsed(line: &str) -> Result<CopyRequest, String> {
        match Args::try_parse_from(line.split_whitespace()).map_err(|error| error.to_string())?.command {
            Command::Copy(args) => {
                let here = args.destinations.iter().filter(|end| !matches!(end, Endpoint::Ssh(_)));
                let destinations: Result<Vec<_>, _> = here.map(Endpoint::destination).collect();
                of_copy(&args, &args.source.source()?, &destinations?)
            }
            Command::Move(args) => of_move(&args, args.destination.as_ref().unwrap()),
            _ => Err("another command".into()),
        }
    }

    #[test]
    fn each_command_has_its_task() {
        let task = |line: &str| parsed(line).unwrap().task;
        assert!(matches!(
            task("towline copy --resume qmp:a a.img"),
            Task::Copy { after: AfterCopy::SourceResumed, .. }
        ));
        assert!(matches!(
            task("towline copy --paused a.img qmp:a"),
            Task::Copy { after: AfterCopy::SourcePaused { run: Some(false) }, .. }
        ));
        assert!(matches!(
            task("towline move --detach-vsock --run qmp:a qmp:b"),
            Task::Move { detach_vsock: true, run: Some(true), .. }
        ));
        assert!(matches!(
            task("towline copy --live --base b.img qmp:a a.img"),
            Task::Snapshot { base: Some(_) }
        ));
        assert!(matches!(
            task("towline copy --postcopy --recover a.img qmp:a"),
            Task::Postcopy {
                start: PostcopyStart::Recover,
                requested_pages: RequestedPages::MainChannel,
                ..
            }
        ));
        assert!(matches!(
            task("towline move --postcopy --postcopy-preempt qmp:a qmp:b"),
            Task::Postcopy {
                start: PostcopyStart::Move { .. },
                requested_pages: RequestedPages::PreemptChannel,
                ..
            }
        ));
    }

    #[test]
    fn conflicting_options_are_refused_with_a_remedy() {
        for (line, text) in [
            ("copy --live --multifd-channels 4 qmp:a a.img", "has a single channel; leave the option out"),
            ("copy --live --max-bandwidth 4M qmp:a a.img", "leave the limit out"),
            ("copy --live --throttle qmp:a a.img", "leave --throttle out"),
            ("copy --live --postcopy qmp:a a.img", "leave one of the two out"),
            ("copy --live --resume qmp:a a.img", "cannot be used with"),
            ("copy --resume --memory-only qmp:a qmp:b", "from qmp: to a file or a store"),
            ("copy --memory-only qmp:a a.img", "with --resume or --live"),
            ("copy --resume --postcopy qmp:a qmp:b", "the guest would run twice"),
            ("copy --resume --run qmp:a qmp:b", "the same guest would run twice"),
            ("copy --postcopy --base b.img a.img qmp:b", "needs an image as DEST"),
            ("copy --base tcp:a:1 qmp:a a.img", "expected an image"),
            ("copy --postcopy --recover --paused a.img qmp:b", "leave --run and --paused out"),
            ("move --postcopy --recover qmp:a qmp:b", "unexpected argument '--recover'"),
            ("move --postcopy --detach-vsock qmp:a qmp:b", "leave --postcopy and --if-not-converging out"),
            ("move --postcopy --detach-vsock qmp:a tcp:b:1", "needs a qmp: DEST"),
            ("move --postcopy --via relay qmp:a ssh:b", "not through both towlines"),
            ("move --postcopy --postcopy-preempt qmp:a ssh:b", "for two QEMUs of one host"),
            ("move --if-not-converging postcopy --via relay qmp:a ssh:b", "leave --via relay out"),
            ("move --if-not-converging postcopy qmp:a ssh:b//a.img", "an image does not run"),
            ("copy --postcopy qmp:a ssh:b//a.img", "leave it out"),
            ("move --tls-creds d qmp:a ssh:b", "leave --tls-creds out"),
            ("move --via relay --zero-copy-send on qmp:a ssh:b", "leave --zero-copy-send out"),
            ("move --via direct qmp:a qmp:b", "leave them out"),
            ("move --via direct qmp:a ssh:b//a.img", "leave the option out"),
            ("move --return-path off qmp:a ssh:b", "leave --return-path out"),
            ("move --compression zstd --multifd-channels 0 qmp:a ssh:b", "needs lanes"),
            ("move --shared-disks qmp:a qmp:b", "are for ssh:HOST"),
            ("move --with-disks qmp:a ssh:b//a.img", "an image has no disks"),
            ("copy qmp:a ssh:b/web", "would be a second guest"),
            ("copy --resume --with-disks qmp:a ssh:b//a.img", "--resume and --live with ssh:b"),
        ] {
            let error = parsed(&format!("towline {line}")).unwrap_err();
            assert!(error.contains(text), "{line}: {error}");
        }
    }
}
