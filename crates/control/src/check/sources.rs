//! Facts from elsewhere than a QEMU or an image: control sockets of towline's devices, recorded files, the
//! output of a command, and `migration_version` attributes.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::OFlags;
use serde_json::{Map, Value};
use towline_compat::facts::{AttributeFacts, Subject};
use towline_compat::{Facts, limits};
use towline_qmp::{self as qmp, Client};

use crate::qemu;

/// Error of recorded facts.
#[derive(Debug, thiserror::Error)]
pub enum RecordedError {
    /// The facts cannot be read.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The facts cannot be parsed.
    #[error("{0}")]
    Facts(#[from] towline_compat::Error),
    /// The command failed.
    #[error("the command ended with {0}; its own output says why")]
    Command(std::process::ExitStatus),
}

pub(super) fn of_file(path: &Path) -> Result<Facts, RecordedError> {
    Ok(Facts::parse(&bounded(File::open(path)?)?)?)
}

/// Runs `sh -c COMMAND` and reads its output.
pub(super) fn of_command(command: &str) -> Result<Facts, RecordedError> {
    let mut child =
        Command::new("/bin/sh").args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let read = child.stdout.take().map_or_else(|| Ok(Vec::new()), bounded);
    // A command that printed too much may never stop.
    let is_ended_here = read.as_ref().map_or(true, |bytes| bytes.len() > limits::FACTS_BYTES_MAX);
    if is_ended_here {
        child.kill()?;
    }
    let ended = child.wait()?;
    let bytes = read?;
    if !is_ended_here && !ended.success() {
        return Err(RecordedError::Command(ended));
    }
    Ok(Facts::parse(&bytes)?)
}

/// Reads one byte more than the limit, so an excess is noticed.
fn bounded(from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(limits::FACTS_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Writes facts to a file for [`CheckEnd::Facts`](super::CheckEnd::Facts).
///
/// # Errors
/// The file cannot be written.
pub fn write_facts(path: &Path, facts: &Facts) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&facts.to_json())?;
    file.sync_all()
}

/// Facts of the device, with its version.
pub(super) fn of_control(path: &Path) -> Result<Facts, Error> {
    let fault = |source: qmp::Error| Error::Control { path: path.to_owned(), source: source.into() };
    let mut client = Client::connect(path, &qmp::Options::default()).map_err(fault)?;
    let facts = client.execute_raw("query-device-facts", None).map_err(fault)?;
    let from = format!("ctl:{}", path.display());
    Facts::parse(facts.to_string().as_bytes())
        .map_err(|source| Error::Recorded { from, source: source.into() })
}

/// Passes the source's version to the device; the error is its reply.
pub(super) fn control_accepts(path: &Path, device_type: &str, version: &str) -> Result<(), String> {
    let arguments: Map<String, Value> =
        [("type".into(), device_type.into()), ("version".into(), version.into())].into_iter().collect();
    let answer = Client::connect(path, &qmp::Options::default())
        .and_then(|mut client| client.execute_raw("check-migration-version", Some(arguments)));
    match answer {
        Ok(_) => Ok(()),
        Err(qmp::Error::Refusal { desc, .. }) => Err(desc),
        Err(error) => Err(error.to_string()),
    }
}

/// Error of gathering an end's facts.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A QEMU could not be queried.
    #[error("{0}")]
    Qemu(#[from] qemu::Error),
    /// A control socket could not be queried, or is not that of a device.
    #[error("ctl:{}: {source}", path.display())]
    Control { path: PathBuf, source: Box<qmp::Error> },
    /// An image cannot be read.
    #[error("{0}")]
    Image(#[from] towline_image::Error),
    /// Recorded facts cannot be read.
    #[error("{from}: {source}")]
    Recorded { from: String, source: RecordedError },
    /// The type of an attribute cannot be determined.
    #[error("{}: {source}", path.display())]
    Attribute { path: PathBuf, source: std::io::Error },
}

// `migration_version` attributes: files that are read and written in one call each, as in sysfs.
//
// ```text
// …/mdev_supported_types/i915-GVTg_V5_4/migration_version      the directory's name is the device's type
// ```

/// Reads the type, which is the name of the attribute's real directory, and the version or the errno.
pub(super) fn read_attribute(path: &Path) -> io::Result<Facts> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = fs::canonicalize(directory)?;
    let device_type = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut attribute = AttributeFacts { device_type, ..AttributeFacts::default() };
    match version(path) {
        Ok(version) => attribute.version = Some(version),
        Err(error) => attribute.errno = Some(errno(&error)),
    }
    Ok(Subject::Attribute(attribute).into())
}

/// Reads in one call, up to a page plus one byte, so an excess is noticed.
fn version(path: &Path) -> io::Result<String> {
    let mut bytes = vec![0; limits::MIGRATION_VERSION_BYTES_MAX + 1];
    let length = options().read(true).open(path)?.read(&mut bytes)?;
    bytes.truncate(length);
    String::from_utf8(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EILSEQ))
}

/// Writes the source's version unchanged. The errno is the device's reply.
pub(super) fn write_attribute(path: &Path, version: &str) -> Result<(), i32> {
    let written = options().write(true).open(path).and_then(|mut file| file.write(version.as_bytes()));
    match written {
        Ok(length) if length == version.len() => Ok(()),
        Ok(_) => Err(libc::EIO),
        Err(error) => Err(errno(&error)),
    }
}

/// Creates and truncates nothing, and does not wait for the other end of a FIFO.
fn options() -> fs::OpenOptions {
    let mut options = File::options();
    options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    options
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;
    use std::process::Command;

    use towline_compat::facts::ImageFacts;
    use towline_compat::{ConfiguredBy, Subject, Verdict};

    use super::super::{CheckEnd, check};
    use super::*;

    #[test]
    fn facts_are_read_from_a_file_and_from_a_command() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("facts.json");
        let facts: Facts = Subject::Image(ImageFacts { machine: "m".into(), ..ImageFacts::default() }).into();
        write_facts(&path, &facts).unwrap();
        assert_eq!(of_file(&path).unwrap(), facts);
        assert_eq!(of_command(&format!("cat {}", path.display())).unwrap(), facts);
    }

    #[test]
    fn command_that_fails_or_never_ends_is_an_error() {
        assert!(matches!(of_command("exit 3"), Err(RecordedError::Command(_))));
        assert!(matches!(
            of_command("yes"),
            Err(RecordedError::Facts(towline_compat::Error::TooLong { .. }))
        ));
        assert!(matches!(of_command("echo no facts"), Err(RecordedError::Facts(_))));
        assert!(matches!(of_file(Path::new("/nowhere/facts.json")), Err(RecordedError::Io(_))));
    }

    /// An attribute of a device of this type, which `with` creates.
    fn attribute(directory: &Path, host: &str, kind: &str, with: impl FnOnce(&Path)) -> CheckEnd {
        let path: PathBuf = directory.join(host).join(kind).join("migration_version");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        with(&path);
        CheckEnd::Attribute(path)
    }

    fn holding(text: &'static str) -> impl FnOnce(&Path) {
        move |path| fs::write(path, text).unwrap()
    }

    fn verdict(source: &CheckEnd, destination: &CheckEnd) -> (Verdict, String) {
        let report = check(source, destination, crate::check::PlannedTransfer::default()).unwrap();
        let texts: Vec<_> = report.findings().iter().map(ToString::to_string).collect();
        (report.verdict(ConfiguredBy::Towline), texts.join("; "))
    }

    #[test]
    fn version_of_the_source_is_written_to_the_destination() {
        let directory = tempfile::tempdir().unwrap();
        let source = attribute(directory.path(), "a", "net-1", holding("v2 mq=4\n"));
        let destination = attribute(directory.path(), "b", "net-1", holding("v3 mq=4\n"));
        assert_eq!(verdict(&source, &destination), (Verdict::Yes, String::new()));
        let CheckEnd::Attribute(path) = &destination else { panic!("made so") };
        assert_eq!(fs::read_to_string(path).unwrap(), "v2 mq=4\n");
    }

    #[test]
    fn attribute_without_a_reader_is_an_errno() {
        let directory = tempfile::tempdir().unwrap();
        let source = attribute(directory.path(), "a", "net-1", holding("v2"));
        let fifo = attribute(directory.path(), "b", "net-1", |path| {
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        });
        let CheckEnd::Attribute(path) = &fifo else { panic!("made so") };
        let (found, text) = verdict(&source, &fifo);
        assert_eq!(found, Verdict::No);
        assert!(text.contains("No such device or address (os error 6)"), "{text}");
        // The device opens its end first; a write to a FIFO that is open does not wait.
        let mut device = options().read(true).open(path).unwrap();
        assert_eq!(verdict(&source, &fifo).0, Verdict::Yes);
        let mut got = [0; 8];
        let length = device.read(&mut got).unwrap();
        assert_eq!(&got[..length], b"v2");
    }

    #[test]
    fn errno_of_the_device_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let source = attribute(directory.path(), "a", "net-1", holding("v2"));
        let full = attribute(directory.path(), "b", "net-1", |path| symlink("/dev/full", path).unwrap());
        let (found, text) = verdict(&source, &full);
        assert_eq!(found, Verdict::No);
        assert!(text.contains("refuses the source's version: No space left on device"), "{text}");
        let unreadable =
            attribute(directory.path(), "c", "net-1", |path| symlink("/proc/self/mem", path).unwrap());
        let (found, text) = verdict(&unreadable, &source);
        assert_eq!(found, Verdict::CouldNotTell);
        assert!(text.contains("cannot be read: Input/output error"), "{text}");
    }

    #[test]
    fn types_are_compared_before_the_version_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let source = attribute(directory.path(), "a", "net-1", holding("v2"));
        let other = attribute(directory.path(), "b", "vsock-1", holding("v1"));
        assert_eq!(verdict(&source, &other).0, Verdict::No);
        let CheckEnd::Attribute(path) = &other else { panic!("made so") };
        assert_eq!(fs::read_to_string(path).unwrap(), "v1", "nothing was written");
        // As in sysfs, where a device's mdev_type is a link to the type's directory.
        let link = directory.path().join("mdev_type");
        symlink(directory.path().join("a/net-1"), &link).unwrap();
        let there = attribute(directory.path(), "c", "net-1", holding("v2"));
        assert_eq!(verdict(&CheckEnd::Attribute(link.join("migration_version")), &there).0, Verdict::Yes);
    }
}
