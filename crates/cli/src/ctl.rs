//! `towline ctl`: sends a QMP command to a running towline or QEMU, and prints the reply.

use std::borrow::Cow;
use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use rustix::process::geteuid;
use serde_json::{Map, Value};
use towline_launch::{GuestName, RuntimeRoot};
use towline_qmp::{Client, Options};

use crate::args::CtlArgs;
use crate::exit::{Exit, UsageError};

/// Runs `ctl`.
pub(crate) fn run(args: &CtlArgs) -> Result<Exit> {
    let arguments = arguments(&args.arguments).map_err(UsageError)?;
    let mut client = connect(&socket(&args.socket, &RuntimeRoot::of_user())?)?;
    // A slow command is not an error, and Ctrl-C ends the wait.
    client.set_deadline(Duration::MAX);
    let Some(command) = &args.command else {
        for name in names(&client.execute_raw("query-commands", None)?) {
            print(&name)?;
        }
        return Ok(Exit::Done);
    };
    let value = client.execute_raw(full_name(command), arguments).map_err(|error| {
        let is_unknown = error.is_command_not_found();
        let known = is_unknown.then(|| client.execute_raw("query-commands", None).ok()).flatten();
        match known.and_then(|known| nearest(command, names(&known))) {
            Some(name) => anyhow!("{error}; did you mean {name}?"),
            None => error.into(),
        }
    })?;
    print(&serde_json::to_string_pretty(&value).context("formatting the reply")?)?;
    Ok(Exit::Done)
}

fn connect(socket: &Path) -> Result<Client> {
    Client::connect(socket, &Options::default()).map_err(|error| match error {
        towline_qmp::Error::Missing { socket } => anyhow!(
            "no QMP socket at {socket}: check the path; a towline removes the socket of its --qmp when it ends"
        ),
        error => error.into(),
    })
}

/// Returns the socket: that of an endpoint `qmp:` or `ctl:`, a path, or the monitor of the guest of that
/// name. A socket of this user in the working directory precedes a guest; other files do not, nor do sockets
/// of other users, which could be there to receive the commands.
pub(crate) fn socket<'a>(text: &'a Path, root: &RuntimeRoot) -> Result<Cow<'a, Path>> {
    if let Some(path) = ["qmp:", "ctl:"].iter().find_map(|scheme| text.to_str()?.strip_prefix(scheme)) {
        return Ok(Path::new(path).into());
    }
    let is_path = text.components().count() != 1 || text.starts_with(".") || is_own_socket(text);
    let name = text.to_str().and_then(|name| name.parse::<GuestName>().ok()).filter(|_| !is_path);
    let Some(name) = name else { return Ok(text.into()) };
    let socket: Option<PathBuf> = root.find(&name)?.map(|guest| guest.qmp);
    socket.map(Cow::Owned).with_context(|| {
        format!(
            "{name}: no guest of this user has this name (`towline ps` lists them), and no socket here; a towline \
             removes the socket of its --qmp when it ends"
        )
    })
}

fn is_own_socket(path: &Path) -> bool {
    let found = std::fs::metadata(path);
    found.is_ok_and(|found| found.file_type().is_socket() && found.uid() == geteuid().as_raw())
}

/// Returns QMP's name of a command with a short one.
fn full_name(command: &str) -> &str {
    match command {
        "status" => "query-status",
        "powerdown" => "system_powerdown",
        "reset" => "system_reset",
        other => other,
    }
}

/// Returns the names of the commands, sorted.
fn names(commands: &Value) -> Vec<String> {
    let names = commands.as_array().into_iter().flatten();
    let mut names: Vec<String> =
        names.filter_map(|command| Some(command["name"].as_str()?.to_owned())).collect();
    names.sort();
    names
}

/// Returns the name that a mistyped one is most like, if it is like any.
fn nearest(typed: &str, names: Vec<String>) -> Option<String> {
    let near = names.into_iter().map(|name| (strsim::jaro(typed, &name), name));
    near.filter(|(likeness, _)| *likeness > 0.8).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
}

/// Parses one JSON object, or arguments `key=value`, where a value is JSON if it can be, else text. Dots in a
/// key address nested objects, as on QEMU's own command line.
fn arguments(words: &[String]) -> Result<Option<Map<String, Value>>, String> {
    if let [word] = words
        && word.starts_with('{')
    {
        return match serde_json::from_str(word) {
            Ok(Value::Object(object)) => Ok(Some(object)),
            Ok(_) => Err(format!("{word}: expected a JSON object")),
            Err(error) => Err(format!("{word}: expected a JSON object: {error}")),
        };
    }
    let mut arguments = Map::new();
    for word in words {
        let (key, value) =
            word.split_once('=').ok_or_else(|| format!("{word}: expected KEY=VALUE, or one JSON object"))?;
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
        put(&mut arguments, key, value)
            .map_err(|()| format!("{word}: a prefix of {key} is a value already"))?;
    }
    Ok((!arguments.is_empty()).then_some(arguments))
}

fn put(object: &mut Map<String, Value>, key: &str, value: Value) -> Result<(), ()> {
    match key.split_once('.') {
        None => {
            object.insert(key.to_owned(), value);
            Ok(())
        }
        Some((first, rest)) => {
            let inner = object.entry(first).or_insert_with(|| Value::Object(Map::new()));
            put(inner.as_object_mut().ok_or(())?, rest, value)
        }
    }
}

fn print(text: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{text}")?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(words: &[&str]) -> Result<Option<Map<String, Value>>, String> {
        arguments(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_are_json_where_they_can_be() {
        let wanted =
            json!({ "max-bandwidth": 1_048_576, "id": "net0", "up": false, "a": { "b": [1], "c": "1.2.3" } });
        let words = ["max-bandwidth=1048576", "id=net0", "up=false", "a.b=[1]", "a.c=1.2.3"];
        assert_eq!(of(&words).unwrap().map(Value::Object), Some(wanted.clone()));
        assert_eq!(of(&[&wanted.to_string()]).unwrap().map(Value::Object), Some(wanted));
        assert_eq!(of(&[]).unwrap(), None);
    }

    #[test]
    fn a_mistyped_command_has_its_nearest_name() {
        let names = || ["query-status", "query-stats", "quit", "cont"].map(str::to_owned).to_vec();
        assert_eq!(nearest("query-staus", names()).as_deref(), Some("query-status"));
        assert_eq!(nearest("system_reset", names()), None);
    }

    #[test]
    fn a_word_is_a_guest_unless_a_socket_has_that_name() {
        let directory = tempfile::tempdir().unwrap();
        let root = RuntimeRoot::at(directory.path().join("guests"));
        for path in ["/run/a.qmp", "run/a.qmp", "./web", "a b"] {
            assert_eq!(socket(Path::new(path), &root).unwrap(), Path::new(path));
        }
        // As other commands name it.
        for (endpoint, path) in [("qmp:a.qmp", "a.qmp"), ("qmp:/run/a.qmp", "/run/a.qmp"), ("ctl:web", "web")]
        {
            assert_eq!(socket(Path::new(endpoint), &root).unwrap(), Path::new(path));
        }
        // A file and a directory of the working directory, which is this crate's.
        for file in ["Cargo.toml", "src"] {
            assert!(Path::new(file).exists() && socket(Path::new(file), &root).is_err(), "{file}");
        }
        let path = directory.path().join("web");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(is_own_socket(&path) && !is_own_socket(directory.path()));
        let error = socket(Path::new("web-0"), &root).unwrap_err().to_string();
        assert!(error.starts_with("web-0: no guest of this user has this name"), "{error}");
        assert!(error.ends_with("a towline removes the socket of its --qmp when it ends"), "{error}");
        assert_eq!(
            ["status", "powerdown", "quit"].map(full_name),
            ["query-status", "system_powerdown", "quit"]
        );
    }

    #[test]
    fn a_towline_that_has_ended_has_no_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("copy.ctl");
        let error = connect(&path).unwrap_err().to_string();
        assert!(error.contains("copy.ctl: check the path; a towline removes the socket"), "{error}");
    }

    #[test]
    fn invalid_arguments_are_refused() {
        assert!(of(&["up"]).unwrap_err().starts_with("up: expected KEY=VALUE"));
        assert!(of(&["{\"a\":"]).unwrap_err().starts_with("{\"a\":: expected a JSON object"));
        assert!(of(&["a=1", "a.b=2"]).unwrap_err().contains("a prefix of a.b is a value already"));
    }
}
