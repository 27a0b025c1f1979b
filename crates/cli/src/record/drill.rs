//! `towline record --verify-restore`: runs the newest image of a record, to see that it would run if it were needed.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use rustix::fs::{FlockOperation, flock};
use towline_channel::Cancel;
use towline_control::record::{Place, RecordedInstant};
use towline_control::run::{Disks, Networks, Running};
use towline_image::atomic_file::LockedFile;
use towline_launch::GuestName;
use towline_qmp::commands::QueryStatus;
use towline_qmp::{Client, Options};

use crate::args::{RecordArgs, StartArgs};
use crate::console;
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::run::RecordedRun;

/// Runs the drill.
pub(super) fn run(args: &RecordArgs, place: &Place, newest: &RecordedInstant) -> Result<Exit> {
    let image = place.image(newest)?;
    let overlays = match place {
        Place::Directory(path) => Some(OverlayDirectory::create(path, &args.name)?),
        Place::Prefix(_) => None,
    };
    let run = RecordedRun {
        image,
        start: StartArgs {
            set: args.set.clone(),
            qemu: args.qemu.clone(),
            ..StartArgs::one(Some(args.name.clone()), args.output)
        },
        is_trusted: args.trust_command_line,
        disks: Disks::Overlays(overlays.as_ref().map(|directory| directory.path.clone())),
        networks: Networks::Separate,
    };
    let look_after = |running: Running, cancel: &Cancel, reporter: &Reporter| {
        let exit = watch(running, cancel, reporter, args)?;
        if exit == Exit::Done {
            reporter.line(&format!("image {} of {} runs", newest.sequence, newest.at));
        }
        Ok(exit)
    };
    let exit = run.start(&look_after);
    if let Some(OverlayDirectory { path, .. }) = overlays {
        fs::remove_dir_all(&path).with_context(|| path.display().to_string())?;
    }
    exit
}

/// Ends the guest after its time. It must run until then.
fn watch(mut running: Running, cancel: &Cancel, reporter: &Reporter, args: &RecordArgs) -> Result<Exit> {
    let (begun, mut has_ended) = (Instant::now(), None);
    let (over, time) = (cancel.clone(), args.run_for);
    thread::Builder::new().name("drill".into()).spawn(move || {
        thread::sleep(time);
        over.cancel();
    })?;
    running.supervise(cancel, &mut |end| has_ended = Some(end.guest.qemu.log_tail()))?;
    if cancel.is_cancelled() && begun.elapsed() < args.run_for {
        return Ok(Exit::Failed);
    }
    if let Some(log) = has_ended {
        console::error(&format!("the guest of the drill has ended: {log}"));
        return Ok(Exit::Failed);
    }
    for guest in running.guests() {
        let status = Client::connect(guest.qemu.qmp_path(), &Options::default())?.execute(&QueryStatus)?;
        if !status.running {
            console::error(&format!(
                "the guest of the drill does not run: its state is `{}`",
                status.status.as_str()
            ));
            return Ok(Exit::Failed);
        }
        reporter.line(&format!("{} has run for {} s", guest.start.name, args.run_for.as_secs()));
    }
    Ok(Exit::Done)
}

/// The directory of a drill's overlays, in that of the record.
struct OverlayDirectory {
    path: PathBuf,
    /// Locked: of one drill.
    _lock: LockedFile,
}

impl OverlayDirectory {
    /// Creates it, or takes over that of a drill that was killed.
    fn create(place: &Path, name: &GuestName) -> Result<Self> {
        let path = place.join(format!(".{}.drill", name.as_str()));
        let locked = || -> io::Result<LockedFile> {
            // QEMU's user has to pass.
            DirBuilder::new().recursive(true).mode(0o711).create(&path)?;
            let lock = LockedFile(File::open(&path)?);
            flock(&lock.0, FlockOperation::NonBlockingLockExclusive)?;
            fs::read_dir(&path)?.try_for_each(|entry| fs::remove_file(entry?.path()))?;
            Ok(lock)
        };
        let lock = locked().map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                anyhow!("a drill named {name} runs already; give this one another --name")
            }
            _ => anyhow!("{}: {error}", path.display()),
        })?;
        Ok(Self { path, _lock: lock })
    }
}
