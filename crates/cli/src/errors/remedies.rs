//! The options that remedy errors of the libraries, which do not know them.

use std::error::Error;

use towline_control::generations::Error as GenerationsError;
use towline_control::in_place::Error as InPlaceError;
use towline_control::plan::{BlockedBy, Error as PlanError};
use towline_control::run::Error as RunError;
use towline_control::upgrade::Error as UpgradeError;
use towline_image::Error as ImageError;
use towline_image::atomic_file::Error as FileError;
use towline_launch::{
    LaunchError, MemoryFileError, NameError, OverlayError, Refused, RuntimeError, SharedNetwork,
};
use towline_migration::Error as MigrationError;
use towline_migration::convergence::CannotConverge;
use towline_protocol::{InvalidMessage, PeerIncompatible, PeerMisbehaved};

use super::invalid;
use crate::command_line::quoted;
use crate::units::size;

/// Returns the text of an error with its option; `None` if none changes it.
pub(super) fn worded(error: &(dyn Error + 'static)) -> Option<String> {
    /// The error, which a variant of another one may have boxed.
    fn of<T: Error + 'static>(
        error: &(dyn Error + 'static),
        worded: fn(&T) -> Option<String>,
    ) -> Option<String> {
        worded(error.downcast_ref::<T>().or_else(|| error.downcast_ref::<Box<T>>().map(|boxed| &**boxed))?)
    }
    #[cfg(feature = "store")]
    let stored = of(error, store);
    #[cfg(not(feature = "store"))]
    let stored = None;
    stored
        .or_else(|| of(error, plan))
        .or_else(|| of(error, run))
        .or_else(|| of(error, upgrade))
        .or_else(|| of(error, in_place))
        .or_else(|| of(error, image))
        .or_else(|| of(error, file))
        .or_else(|| of(error, migration))
        .or_else(|| of(error, converge))
        .or_else(|| of(error, invalid_message))
        .or_else(|| of(error, misbehaved))
        .or_else(|| of(error, incompatible))
        .or_else(|| of(error, runtime))
        .or_else(|| of(error, overlay))
        .or_else(|| of(error, launch))
        .or_else(|| of(error, memory))
        .or_else(|| of(error, refused))
        .or_else(|| of(error, generation))
        .or_else(|| of(error, |error: &NameError| Some(format!("{error}; choose another with --name"))))
}

fn generation(error: &GenerationsError) -> Option<String> {
    let GenerationsError::Managed { name, .. } = error else { return None };
    Some(format!(
        "{error}; have the cluster do it (`crm_resource --move`), or have it look away first (`crm_resource --meta -r RESOURCE -p \
         is-managed -v false`), and then `towline move --unmanaged` to ssh:HOST/{name} (docs/cluster.md)"
    ))
}

fn plan(error: &PlanError) -> Option<String> {
    Some(match error {
        PlanError::Invalid(invalid) => invalid::text(invalid),
        PlanError::NeedsCont { .. } => format!("{error}, or pass --resume"),
        PlanError::Blocked { socket, reasons } => blocked(socket, reasons),
        PlanError::LaneLost { lanes, compression, source } => format!(
            "{source}: the destination ended, its multifd-channels is not {lanes}, or its multifd-compression is not {compression} as here \
             (--multifd-channels, --compression); its own log says which"
        ),
        PlanError::WritesDisk { .. } => format!(
            "{error}; pass --with-disks to keep the disk as it is (the guest continues in an overlay of it), or pause the guest, keep its \
             disks yourself and pass --memory-only"
        ),
        PlanError::DisksNotKept { .. } => format!(
            "{error}; save it without --resume (the guest is then paused) and run that image (`towline run`), or pass --memory-only"
        ),
        PlanError::NoOverlayDirectory { .. } => format!("{error} (--overlay-dir DIR)"),
        PlanError::NothingToRecover { .. } => format!("{error}: --recover needs one"),
        PlanError::NotCarried { .. } => {
            format!("{error} (--set drive.ID.file=, --set device.ID=, arguments after --)")
        }
        _ => return None,
    })
}

fn blocked(socket: &str, reasons: &[BlockedBy]) -> String {
    let reason = |reason: &BlockedBy| match reason {
        BlockedBy::Snapshot { status, version } => format!(
            "with --live and a guest that is `{status}`, QEMU {version} aborts, or runs the guest afterwards: resume it first (`cont`), or \
             leave --live out"
        ),
        BlockedBy::Postcopy { status } => {
            format!("with --postcopy a guest that is `{status}` arrives as `paused`: leave --postcopy out")
        }
        BlockedBy::EmulatedPostcopy { version } => format!(
            "--postcopy with a running guest that QEMU {version} emulates: QEMU loses track of what such a guest writes while it is sent; \
             leave --postcopy out, or pause the guest first (`stop`) and give --run"
        ),
        reason => reason.to_string(),
    };
    let text: Vec<_> = reasons.iter().map(reason).collect();
    let remedy = if reasons.iter().any(|reason| matches!(reason, BlockedBy::Vsock(_))) {
        "; `towline move --detach-vsock` to a qmp: DEST unplugs the vsock, and plugs it in again there"
    } else {
        ""
    };
    format!("QEMU on {socket} cannot send this guest: {}{remedy}", text.join("; "))
}

fn run(error: &RunError) -> Option<String> {
    Some(match error {
        RunError::NoCommandLine { .. } => format!("{error}; write all arguments of its QEMU after --"),
        RunError::NoCacheDirectory => format!("{error}; give --cache-dir"),
        RunError::Cache { .. } => format!("{error}; choose another with --cache-dir, or use --postcopy"),
        RunError::NoRoom { directory, free, needed, image } => format!(
            "directory {} has {} free, expected {} for {image}; choose another with --cache-dir, or use --postcopy",
            directory.display(),
            size(*free),
            size(*needed)
        ),
        RunError::SharedNetwork(
            SharedNetwork::Type { setting, .. } | SharedNetwork::Bridge { setting, .. },
        ) => {
            format!("{error}; give it another with --set {setting}=…, or allow that with --same-network")
        }
        RunError::BackingFile { setting, .. } => {
            format!("{error} (--overlay, or --set {setting}.file=PATH)")
        }
        RunError::OtherInstant { setting, .. } => format!("{error} (--set {setting}.file=PATH)"),
        RunError::NotMapped { .. } => format!("{error}; leave --share out, and it is copied"),
        _ => return None,
    })
}

fn upgrade(error: &UpgradeError) -> Option<String> {
    Some(match error {
        UpgradeError::NoBinary { .. } => format!("{error}; name the new one with --qemu"),
        UpgradeError::OneFrontend { .. } => format!(
            "{error}; it must be a `towline net` without --af-xdp that has one QEMU (restart it if it is an older one), or unplug the card \
             before"
        ),
        UpgradeError::PrivateMemory { .. } => format!("{error}, or copy the memory with --copy"),
        UpgradeError::OldTarget { .. } => {
            format!("{error}; name another with --qemu, or copy the memory with --copy")
        }
        _ => return None,
    })
}

fn in_place(error: &InPlaceError) -> Option<String> {
    matches!(error, InPlaceError::NotMapped { .. })
        .then(|| format!("{error}; leave --share out, and it is copied"))
}

fn image(error: &ImageError) -> Option<String> {
    Some(match error {
        ImageError::NotMappedRam { .. } => {
            format!("{error}: convert it with `towline copy --return-path off exec:'cat FILE' file:IMAGE`")
        }
        ImageError::BaseDiffers { .. } => format!("{error}; store it whole, without --base"),
        _ => return None,
    })
}

fn file(error: &FileError) -> Option<String> {
    matches!(error, FileError::Exists { .. })
        .then(|| format!("{error}; choose another name, remove it, or pass --overwrite"))
}

#[cfg(feature = "store")]
fn store(error: &towline_image::store::Error) -> Option<String> {
    matches!(error, towline_image::store::Error::Exists { .. })
        .then(|| format!("{error}; give another name, or --overwrite"))
}

fn migration(error: &MigrationError) -> Option<String> {
    Some(match error {
        MigrationError::LanesMissing { .. } | MigrationError::LaneTooMany { .. } => {
            format!("{error} (--multifd-channels)")
        }
        MigrationError::NoAnswer { .. } => {
            format!("{error}; a file or filter that only takes the stream needs --return-path off")
        }
        MigrationError::NoZeroCopy { why } => format!(
            "zero-copy sends (--zero-copy-send on) are not possible: {why}; `auto` goes without where it must"
        ),
        MigrationError::PresentInPostcopy { .. } => {
            format!("{error}: copy the guest without --postcopy")
        }
        _ => return None,
    })
}

fn converge(error: &CannotConverge) -> Option<String> {
    Some(format!(
        "{error}; allow more with --downtime-limit or --max-bandwidth, or slow the guest down with --throttle; with --if-not-converging a move throttles it, or switches to postcopy"
    ))
}

fn invalid_message(error: &InvalidMessage) -> Option<String> {
    let text =
        "the other end replies with TLS: turn TLS on here (--tls-creds; tls-creds of a QEMU), or off there";
    matches!(error, InvalidMessage::Tls).then(|| text.into())
}

fn misbehaved(error: &PeerMisbehaved) -> Option<String> {
    let PeerMisbehaved::Compression { found, expected } = error else { return None };
    Some(format!(
        "compression method {found} on a lane, expected {expected} (multifd-compression differs between the two ends; here it is \
         --compression)"
    ))
}

fn incompatible(error: &PeerIncompatible) -> Option<String> {
    matches!(error, PeerIncompatible::NoReturnPath).then(|| {
        format!("{error}, or, if the stream comes from a file, use `towline copy --return-path off`")
    })
}

fn runtime(error: &RuntimeError) -> Option<String> {
    Some(match error {
        RuntimeError::Taken { .. } => format!("{error}; choose another with --name"),
        RuntimeError::PathTooLong { .. } => format!("{error}; choose a shorter --name or XDG_RUNTIME_DIR"),
        _ => return None,
    })
}

fn overlay(error: &OverlayError) -> Option<String> {
    Some(match error {
        OverlayError::Unsupported { .. } | OverlayError::Tool { .. } => {
            format!("{error}, or leave --overlay out")
        }
        OverlayError::Exists { .. } => {
            format!("{error}; remove it, or choose another --name or --overlay-dir")
        }
        OverlayError::Directory { .. } | OverlayError::NoRoom { .. } => {
            format!("{error}; choose another with --overlay-dir")
        }
        OverlayError::NotMade { .. } => format!("{error}, or choose another --overlay-dir"),
        _ => return None,
    })
}

fn launch(error: &LaunchError) -> Option<String> {
    matches!(error, LaunchError::Binary { .. } | LaunchError::Version { .. })
        .then(|| format!("{error}; name another with --qemu"))
}

fn memory(error: &MemoryFileError) -> Option<String> {
    matches!(error, MemoryFileError::Version { property: "rom", .. }).then(|| format!("{error}, or --copy"))
}

/// Formats the refusals of a command line, with the command that has a setting for each option that is
/// refused.
fn refused(error: &Refused) -> Option<String> {
    if !matches!(error, Refused::Image(_)) {
        return None;
    }
    let mut words: Vec<String> = std::env::args_os().map(|word| quoted(&word)).collect();
    let at = words.iter().position(|word| word == "--").unwrap_or(words.len());
    words.splice(at..at, error.settings().into_iter().map(|key| format!("--set {key}=VALUE")));
    Some(format!(
        "{error}\nGive each with --set (an option with an empty value is removed); or, if you trust who made the image as you trust a \
         program, use --trust-command-line:\n  {}",
        words.join(" ")
    ))
}
