//! What `copy` and `move` ask for, of their options; those that do not go with each other are refused here.

use std::path::PathBuf;
use std::time::Duration;

use towline_control::plan::{Destination, PostcopyStart, Request, Source, Task, TransferOptions};
use towline_migration::Tuning;

use crate::args::{CopyArgs, Method, MoveArgs, Switch, TransferArgs};
use crate::endpoint::Endpoint;

/// Of `copy`.
pub(crate) fn of_copy(args: &CopyArgs, source: &Source) -> Result<Request, String> {
    let base = match &args.base {
        None => None,
        Some(Endpoint::Image(path)) => Some(path.clone()),
        Some(other) => return Err(format!("--base {other}: a base is an image")),
    };
    let (transfer, run) = (transfer(&args.transfer), run(&args.transfer));
    let task = if args.live {
        snapshot(&args.transfer, base)?
    } else if args.transfer.postcopy.postcopy {
        if base.is_some() {
            return Err("--base is for an image that is to be stored: name one as DEST".into());
        }
        if args.resume && matches!(source, Source::Qmp(_)) {
            return Err("--resume with --postcopy: the same guest would run twice".into());
        }
        postcopy(&args.transfer, PostcopyStart::Copy { run })?
    } else {
        Task::Copy { transfer, run, resume: args.resume, base }
    };
    request(&args.transfer, task)
}

/// Of `move`.
pub(crate) fn of_move(args: &MoveArgs, destination: &Destination) -> Result<Request, String> {
    let (run, devices) = (run(&args.transfer), args.device_ctl.clone());
    let task = if args.transfer.postcopy.postcopy {
        if args.detach_vsock {
            let text = match destination {
                Destination::Qmp(_) => {
                    "--detach-vsock goes with a guest whose memory comes first: leave --postcopy out"
                }
                _ => "--detach-vsock needs a qmp: destination, where the device is attached again",
            };
            return Err(text.into());
        }
        postcopy(&args.transfer, PostcopyStart::Move { run, devices })?
    } else {
        Task::Move { transfer: transfer(&args.transfer), run, detach_vsock: args.detach_vsock, devices }
    };
    request(&args.transfer, task)
}

/// QEMU's background-snapshot goes with little else.
fn snapshot(args: &TransferArgs, base: Option<PathBuf>) -> Result<Task, String> {
    let text = if args.multifd_channels.is_some_and(|lanes| lanes > 0) {
        "--live with --multifd-channels: QEMU's background-snapshot has a single channel; leave the option out"
    } else if args.max_bandwidth.is_some() {
        "--live with --max-bandwidth: QEMU sends a background snapshot as fast as it is taken; leave the limit out"
    } else if args.throttle {
        "--live with --throttle: every page is sent once, whatever the guest writes; leave --throttle out"
    } else if args.postcopy.postcopy {
        "--live with --postcopy: an image runs no guest; leave one of the two out"
    } else {
        return Ok(Task::Snapshot { base });
    };
    Err(text.into())
}

fn postcopy(args: &TransferArgs, start: PostcopyStart) -> Result<Task, String> {
    let start = match (args.postcopy.recover, start) {
        (false, start) => start,
        (true, PostcopyStart::Copy { run: None }) => PostcopyStart::Recover,
        (true, PostcopyStart::Copy { .. }) => {
            return Err(
                "--recover goes on with a guest that runs or is paused already: leave --run and --paused out"
                    .into(),
            );
        }
        (true, _) => {
            return Err("--recover is for the guest of an image: two QEMUs that lost each other have `migrate-recover` and `migrate` with resume".into());
        }
    };
    let record_working_set = args.postcopy.record_working_set == Switch::On;
    Ok(Task::Postcopy {
        transfer: transfer(args),
        start,
        preempt: args.postcopy.postcopy_preempt,
        record_working_set,
    })
}

fn transfer(args: &TransferArgs) -> TransferOptions {
    let TransferArgs { multifd_channels, max_bandwidth, throttle, .. } = *args;
    TransferOptions { multifd_channels, max_bandwidth, throttle }
}

fn run(args: &TransferArgs) -> Option<bool> {
    (args.run || args.paused).then_some(args.run)
}

fn request(args: &TransferArgs, task: Task) -> Result<Request, String> {
    if let Some(text) = level_of_nothing(args) {
        return Err(text.into());
    }
    Ok(Request {
        task,
        compression: args.compression.at(args.multifd_zlib_level, args.multifd_zstd_level),
        zero_copy_send: args.zero_copy_send.into(),
        tls: args.tls.tls(),
        downtime_limit: Duration::from_millis(args.downtime_limit),
        verify: args.verify,
        return_path: args.return_path == Switch::On,
        stream: args.stream,
        overwrite: args.overwrite,
        connect_timeout: args.connect_timeout,
        tuning: Tuning::default(),
    })
}

/// A level of what is not used was meant for something.
fn level_of_nothing(args: &TransferArgs) -> Option<&'static str> {
    if args.multifd_zlib_level.is_some() && args.compression != Method::Zlib {
        return Some("--multifd-zlib-level is for --compression zlib");
    }
    let is_of_nothing = args.multifd_zstd_level.is_some() && args.compression != Method::Zstd;
    is_of_nothing.then_some("--multifd-zstd-level is for --compression zstd")
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Args, Command};

    fn asked(line: &str) -> Result<Request, String> {
        match Args::try_parse_from(line.split_whitespace()).map_err(|error| error.to_string())?.command {
            Command::Copy(args) => of_copy(&args, &args.source.source()?),
            Command::Move(args) => of_move(&args, &args.destination.destination()?),
            _ => Err("neither".into()),
        }
    }

    #[test]
    fn each_command_asks_for_its_task() {
        let task = |line: &str| asked(line).unwrap().task;
        assert!(matches!(
            task("towline copy --resume qmp:a a.img"),
            Task::Copy { resume: true, run: None, .. }
        ));
        assert!(matches!(task("towline copy --paused a.img qmp:a"), Task::Copy { run: Some(false), .. }));
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
            Task::Postcopy { start: PostcopyStart::Recover, preempt: false, record_working_set: true, .. }
        ));
        assert!(matches!(
            task("towline move --postcopy --postcopy-preempt qmp:a qmp:b"),
            Task::Postcopy { start: PostcopyStart::Move { .. }, preempt: true, .. }
        ));
    }

    #[test]
    fn what_does_not_go_together_is_refused_with_the_way_out() {
        for (line, text) in [
            ("copy --live --multifd-channels 4 qmp:a a.img", "has a single channel; leave the option out"),
            ("copy --live --max-bandwidth 4M qmp:a a.img", "leave the limit out"),
            ("copy --live --throttle qmp:a a.img", "leave --throttle out"),
            ("copy --live --postcopy qmp:a a.img", "leave one of the two out"),
            ("copy --live --resume qmp:a a.img", "cannot be used with"),
            ("copy --resume --postcopy qmp:a qmp:b", "the same guest would run twice"),
            ("copy --postcopy --base b.img a.img qmp:b", "name one as DEST"),
            ("copy --base tcp:a:1 qmp:a a.img", "a base is an image"),
            ("copy --postcopy --recover --paused a.img qmp:b", "leave --run and --paused out"),
            ("copy --multifd-zlib-level 3 a.img tcp:a:1", "is for --compression zlib"),
            ("copy --compression zlib --multifd-zstd-level 3 a.img tcp:a:1", "is for --compression zstd"),
            ("move --postcopy --recover qmp:a qmp:b", "--recover is for the guest of an image"),
            ("move --postcopy --detach-vsock qmp:a qmp:b", "leave --postcopy out"),
            ("move --postcopy --detach-vsock qmp:a tcp:b:1", "needs a qmp: destination"),
        ] {
            let error = asked(&format!("towline {line}")).unwrap_err();
            assert!(error.contains(text), "{line}: {error}");
        }
    }
}
