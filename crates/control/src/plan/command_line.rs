//! The command line of a QEMU, for the image of its guest.

use std::path::Path;

use towline_image::QemuProcess;
use towline_image::manifest::COMMAND_LINE_BYTES_MAX;
use towline_launch::{CommandLine, ParseError, Recorded};

use crate::qemu::{self, Qemu};

/// Reason that the command line of a QEMU is not recorded with the image of its guest.
#[derive(Debug, thiserror::Error)]
pub enum CommandLineRecordError {
    #[error(
        "QEMU's process is not known: {reason}; save the guest on the host of its QEMU, as the same user"
    )]
    UnknownProcess { reason: String },
    #[error("command line of QEMU's process {pid}: {source}")]
    CommandLine { pid: i32, source: ParseError },
    #[error(
        "command line of QEMU has {found} bytes, expected at most {COMMAND_LINE_BYTES_MAX}; start QEMU with less"
    )]
    TooLong { found: usize },
    #[error("its drives are not known: {0}")]
    Drives(#[from] qemu::Error),
}

/// The command line of a QEMU, without secrets and without the options of its process, and with the files that its drives have now.
pub(super) fn recorded(qemu: &mut Qemu) -> Result<Recorded, CommandLineRecordError> {
    let unknown = |reason: &str| CommandLineRecordError::UnknownProcess { reason: reason.to_owned() };
    let pid = qemu.process().known_pid().map_err(unknown)?;
    let failed = |source| CommandLineRecordError::CommandLine { pid, source };
    let mut command_line = CommandLine::of_process(pid.cast_unsigned()).map_err(failed)?;
    let directory = qemu.working_directory();
    let drives: Vec<_> = qemu.drives()?.into_iter().map(|drive| drive.files).collect();
    command_line.use_current_files(&drives, directory.as_deref().unwrap_or(Path::new("/")));
    command_line.record().map_err(failed)
}

/// Records the command line of a QEMU for an image; and the working directory, where `/proc` shows it: not to a process in a sandbox.
pub(crate) fn record_command_line(qemu: &mut Qemu) -> Result<QemuProcess, CommandLineRecordError> {
    let command_line = recorded(qemu)?.to_json();
    if command_line.len() > COMMAND_LINE_BYTES_MAX {
        return Err(CommandLineRecordError::TooLong { found: command_line.len() });
    }
    let directory = qemu.working_directory();
    let working_directory = directory.and_then(|directory| directory.into_os_string().into_string().ok());
    Ok(QemuProcess { command_line, working_directory, disks: Vec::new() })
}
