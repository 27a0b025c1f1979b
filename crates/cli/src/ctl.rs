//! `towline ctl`: one command to a running towline, or to a QEMU, and its answer.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value};
use towline_qmp::{Client, Options};

use crate::Exit;
use crate::console;

/// Speak QMP to a running towline, or to a QEMU
///
/// Sends one command and prints its answer. Without a command, prints those that there are.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  How far a copy is that was begun with `--qmp /run/towline/a.sock`:
    towline ctl /run/towline/a.sock query-migrate
  Let it go faster, and end it:
    towline ctl /run/towline/a.sock migrate-set-parameters max-bandwidth=500000000
    towline ctl /run/towline/a.sock migrate_cancel
  Pull a guest's network cable (QEMU's own monitor):
    towline ctl /run/vm/a.qmp set_link name=net0 up=false
  Arguments as JSON:
    towline ctl /run/vm/a.qmp qom-get '{\"path\": \"/machine\", \"property\": \"type\"}'
")]
pub(crate) struct CtlArgs {
    /// The Unix socket that it listens on
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,
    /// What to do; without it, which commands there are is printed
    #[arg(value_name = "COMMAND")]
    command: Option<String>,
    /// KEY=VALUE, where VALUE is JSON or text and a dot in KEY reaches into an object; or one JSON object
    #[arg(value_name = "ARGS")]
    arguments: Vec<String>,
    /// How long it may take to answer, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout: u64,
}

/// Runs `ctl`.
pub(crate) fn run(args: &CtlArgs) -> Result<Exit> {
    let arguments = match arguments(&args.arguments) {
        Ok(arguments) => arguments,
        Err(text) => {
            console::error(&text);
            return Ok(Exit::Usage);
        }
    };
    let within = Duration::from_secs(args.timeout);
    let options = Options { deadline: within, greeting_deadline: within, ..Options::default() };
    let mut client = Client::connect(&args.socket, &options)?;
    let Some(command) = &args.command else {
        for name in names(&client.execute_raw("query-commands", None)?) {
            print(&name)?;
        }
        return Ok(Exit::Done);
    };
    let value = client.execute_raw(command, arguments)?;
    print(&serde_json::to_string_pretty(&value).context("an answer that cannot be shown")?)?;
    Ok(Exit::Done)
}

/// In order of the alphabet.
fn names(commands: &Value) -> Vec<String> {
    let names = commands.as_array().into_iter().flatten();
    let mut names: Vec<String> =
        names.filter_map(|command| Some(command["name"].as_str()?.to_owned())).collect();
    names.sort();
    names
}

/// A JSON object as a whole, or `key=value` each, where a value that is JSON is taken as that and any other as text. A key with dots
/// reaches into objects, as on QEMU's own command line.
fn arguments(words: &[String]) -> Result<Option<Map<String, Value>>, String> {
    if let [word] = words
        && word.starts_with('{')
    {
        return match serde_json::from_str(word) {
            Ok(Value::Object(object)) => Ok(Some(object)),
            Ok(_) => Err(format!("{word} is no JSON object")),
            Err(error) => Err(format!("{word} is no JSON object: {error}")),
        };
    }
    let mut arguments = Map::new();
    for word in words {
        let (key, value) = word.split_once('=').ok_or_else(|| {
            format!("{word} is no argument: expected KEY=VALUE, or one JSON object for all")
        })?;
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
        put(&mut arguments, key, value)
            .map_err(|()| format!("{word}: a part of {key} is a value already"))?;
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
    fn what_is_none_is_named() {
        assert!(of(&["up"]).unwrap_err().starts_with("up is no argument"));
        assert!(of(&["{\"a\":"]).unwrap_err().starts_with("{\"a\": is no JSON object"));
        assert!(of(&["a=1", "a.b=2"]).unwrap_err().contains("a part of a.b is a value already"));
    }
}
