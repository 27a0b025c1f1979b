//! Recorded facts.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use towline_compat::{Facts, limits};

/// Error of recorded facts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
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

pub(super) fn of_file(path: &Path) -> Result<Facts, Error> {
    Ok(Facts::parse(&bounded(File::open(path)?)?)?)
}

/// Runs `sh -c COMMAND` and reads its output.
pub(super) fn of_command(command: &str) -> Result<Facts, Error> {
    let mut child =
        Command::new("/bin/sh").args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let read = child.stdout.take().map_or_else(|| Ok(Vec::new()), bounded);
    let ended = end(&mut child, &read)?;
    match read {
        // It was ended because it printed too much.
        Ok(bytes) if bytes.len() > limits::FACTS_BYTES_MAX => Ok(Facts::parse(&bytes)?),
        Ok(_) if !ended.success() => Err(Error::Command(ended)),
        Ok(bytes) => Ok(Facts::parse(&bytes)?),
        Err(error) => Err(error.into()),
    }
}

/// A command that printed too much may never stop.
fn end(child: &mut Child, read: &io::Result<Vec<u8>>) -> io::Result<std::process::ExitStatus> {
    let too_much = read.as_ref().map_or(true, |bytes| bytes.len() > limits::FACTS_BYTES_MAX);
    if too_much {
        child.kill()?;
    }
    child.wait()
}

/// Reads one byte more than the limit, so an excess is noticed.
fn bounded(from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(limits::FACTS_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub(super) fn write(path: &Path, facts: &Facts) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&facts.to_json())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use towline_compat::Subject;
    use towline_compat::facts::ImageFacts;

    use super::*;

    #[test]
    fn facts_are_read_from_a_file_and_from_a_command() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("facts.json");
        let facts: Facts = Subject::Image(ImageFacts { machine: "m".into(), ..ImageFacts::default() }).into();
        write(&path, &facts).unwrap();
        assert_eq!(of_file(&path).unwrap(), facts);
        assert_eq!(of_command(&format!("cat {}", path.display())).unwrap(), facts);
    }

    #[test]
    fn command_that_fails_or_never_ends_is_an_error() {
        assert!(matches!(of_command("exit 3"), Err(Error::Command(_))));
        assert!(matches!(of_command("yes"), Err(Error::Facts(towline_compat::Error::TooLong { .. }))));
        assert!(matches!(of_command("echo no facts"), Err(Error::Facts(_))));
        assert!(matches!(of_file(Path::new("/nowhere/facts.json")), Err(Error::Io(_))));
    }
}
