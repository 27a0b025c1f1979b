//! `towline ctl`: sends a QMP command to a running towline or QEMU, and prints the reply.

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value};
use towline_qmp::{Client, Options};

use crate::args::CtlArgs;
use crate::console;
use crate::exit::Exit;

/// Runs `ctl`.
pub(crate) fn run(args: &CtlArgs) -> Result<Exit> {
    let arguments = match arguments(&args.arguments) {
        Ok(arguments) => arguments,
        Err(text) => {
            console::error(&text);
            return Ok(Exit::Usage);
        }
    };
    let timeout = Duration::from_secs(args.timeout);
    let options = Options { deadline: timeout, greeting_deadline: timeout, ..Options::default() };
    let mut client = Client::connect(&args.socket, &options)?;
    let Some(command) = &args.command else {
        for name in names(&client.execute_raw("query-commands", None)?) {
            print(&name)?;
        }
        return Ok(Exit::Done);
    };
    let value = client.execute_raw(command, arguments)?;
    print(&serde_json::to_string_pretty(&value).context("formatting the reply")?)?;
    Ok(Exit::Done)
}

/// Returns the names of the commands, sorted.
fn names(commands: &Value) -> Vec<String> {
    let names = commands.as_array().into_iter().flatten();
    let mut names: Vec<String> =
        names.filter_map(|command| Some(command["name"].as_str()?.to_owned())).collect();
    names.sort();
    names
}

/// Parses one JSON object, or arguments `key=value`, where a value is JSON if it can be, else text. Dots in a key address nested
/// objects, as on QEMU's own command line.
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
    fn invalid_arguments_are_refused() {
        assert!(of(&["up"]).unwrap_err().starts_with("up: expected KEY=VALUE"));
        assert!(of(&["{\"a\":"]).unwrap_err().starts_with("{\"a\":: expected a JSON object"));
        assert!(of(&["a=1", "a.b=2"]).unwrap_err().contains("a prefix of a.b is a value already"));
    }
}
