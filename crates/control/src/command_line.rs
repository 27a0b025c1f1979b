//! The command line of a QEMU that runs a guest, recorded for the guest's image, and read from it again.

use std::fs;

use towline_image::manifest::COMMAND_LINE_BYTES_MAX;
use towline_image::{Origin, QemuProcess};
use towline_launch::{CommandLine, ParseError, Recorded};

use crate::process::Process;
use crate::qemu::Qemu;

/// Reason that a command line is not recorded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommandLineRecordError {
    /// The process of the QEMU is not known.
    #[error(
        "QEMU's process is not known: {reason}; save the guest on the host of its QEMU, as the same user"
    )]
    UnknownProcess {
        /// The reason.
        reason: String,
    },
    /// The command line cannot be read.
    #[error("command line of QEMU's process {pid}: {source}")]
    CommandLine {
        /// The process.
        pid: i32,
        /// The error.
        source: ParseError,
    },
    /// The command line is longer than an image may contain.
    #[error(
        "command line of QEMU has {found} bytes, expected at most {COMMAND_LINE_BYTES_MAX}; start QEMU with less"
    )]
    TooLong {
        /// Length of the command line in bytes.
        found: usize,
    },
}

/// Records the command line of a QEMU, without secrets and without the options of its process; and the
/// working directory, where `/proc` shows it: not to a process in a sandbox.
///
/// # Errors
/// A process that is not known, or whose command line is not shown or is not one of QEMU's.
pub fn record(qemu: &Qemu) -> Result<QemuProcess, CommandLineRecordError> {
    let pid = match qemu.process() {
        Process::Known { pid, .. } => *pid,
        Process::Unknown { reason } => {
            return Err(CommandLineRecordError::UnknownProcess { reason: reason.clone() });
        }
    };
    let command_line =
        CommandLine::of_process(pid.cast_unsigned()).and_then(|command_line| command_line.record());
    let command_line =
        command_line.map_err(|source| CommandLineRecordError::CommandLine { pid, source })?.to_json();
    if command_line.len() > COMMAND_LINE_BYTES_MAX {
        return Err(CommandLineRecordError::TooLong { found: command_line.len() });
    }
    let directory = fs::read_link(format!("/proc/{pid}/cwd")).ok();
    let working_directory = directory.and_then(|directory| directory.into_os_string().into_string().ok());
    Ok(QemuProcess { command_line, working_directory })
}

/// Returns the command line that is recorded with an image; `None` if there is none.
///
/// # Errors
/// The text is not one, or of a newer version.
pub fn recorded(origin: &Origin) -> Result<Option<Recorded>, ParseError> {
    let process = origin.process.as_ref();
    process.map(|process| Recorded::from_json(process.command_line.as_bytes())).transpose()
}
