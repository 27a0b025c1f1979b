//! Properties of one option: `key=value,key=value`, or JSON.
//!
//! Source of the format: QEMU's `util/keyval.c` and `util/qemu-option.c` (documented in
//! `docs/devel/qapi-code-gen` and the manual's "Invocation"). A comma in a value is written twice. A first
//! word without `=` is the value of the option's implied key, any later one is a boolean that is on.

use serde_json::{Map, Value};

use super::error::ValueError;
use crate::limits::{NAME_BYTES_MAX, PROPERTIES_MAX};

/// One property.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Property {
    /// Key, such as `size` or `cxl-fmw.0.size`.
    pub key: String,
    /// Value, unescaped. `None` is a key alone, which switches a boolean on.
    pub value: Option<String>,
}

/// Properties in the order in which they were given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Properties {
    /// Of the form `key=value,…`.
    KeyValue(Vec<Property>),
    /// Of the form `{"key": value, …}`, which keeps the types of values.
    Json(Map<String, Value>),
}

impl Property {
    fn text(&self) -> String {
        self.value.clone().unwrap_or_else(|| "on".to_owned())
    }
}

impl Properties {
    /// Parses the form `key=value,…`; `implied` is the key of a first word without one.
    pub(crate) fn parse(text: &str, implied: Option<&'static str>) -> Result<Self, ValueError> {
        let mut properties = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            if properties.len() == PROPERTIES_MAX {
                return Err(ValueError::TooManyProperties);
            }
            let word = rest.find([',', '=']).unwrap_or(rest.len());
            let is_pair = rest[word..].starts_with('=');
            let implied = implied.filter(|_| properties.is_empty() && !is_pair);
            let (key, begin) = match implied {
                Some(key) => (key, 0),
                None => (&rest[..word], word + usize::from(is_pair)),
            };
            check_key(key)?;
            rest = &rest[begin..];
            let mut value = None;
            if implied.is_some() || is_pair {
                let (unescaped, length) = unescape(rest);
                rest = &rest[length..];
                value = Some(unescaped);
            }
            properties.push(Property { key: key.to_owned(), value });
            if let Some(next) = rest.strip_prefix(',') {
                if next.is_empty() {
                    return Err(ValueError::TrailingComma);
                }
                rest = next;
            }
        }
        Ok(Self::KeyValue(properties))
    }

    /// Parses a JSON object. Its depth is bounded by the parser's own limit.
    pub(crate) fn parse_json(text: &str) -> Result<Self, ValueError> {
        let map: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| ValueError::Json { reason: error.to_string() })?;
        if map.len() > PROPERTIES_MAX {
            return Err(ValueError::TooManyProperties);
        }
        map.keys().try_for_each(|key| check_key(key))?;
        Ok(Self::Json(map))
    }

    /// Writes them as QEMU reads them. The implied key of a first property is left out where that is not
    /// ambiguous.
    pub(crate) fn to_text(&self, implied: Option<&str>) -> String {
        let properties = match self {
            Self::KeyValue(properties) => properties,
            Self::Json(map) => return Value::Object(map.clone()).to_string(),
        };
        let mut text = String::new();
        for (index, property) in properties.iter().enumerate() {
            if index > 0 {
                text.push(',');
            }
            match &property.value {
                Some(value) if index == 0 && implied == Some(&property.key) && can_stand_alone(value) => {
                    text.push_str(value);
                }
                Some(value) => {
                    text.push_str(&property.key);
                    text.push('=');
                    text.push_str(&value.replace(',', ",,"));
                }
                None => text.push_str(&property.key),
            }
        }
        text
    }

    /// Returns the value of a key as text; of one given several times the last, as QEMU does. A key alone is
    /// `on`.
    pub fn value(&self, key: &str) -> Option<String> {
        match self {
            Self::KeyValue(properties) => {
                properties.iter().rfind(|property| property.key == key).map(Property::text)
            }
            Self::Json(map) => map.get(key).map(scalar_text),
        }
    }

    /// Returns true if a switch is on. One that is not given is off here.
    pub fn is_on(&self, key: &str) -> bool {
        self.value(key).is_some_and(|value| ["on", "yes", "true", "y"].contains(&value.as_str()))
    }

    /// Returns keys and values as text. A list of numbers in JSON is a key with several values; other nested
    /// JSON is kept as written.
    pub fn pairs(&self) -> Vec<(&str, String)> {
        match self {
            Self::KeyValue(properties) => {
                properties.iter().map(|property| (property.key.as_str(), property.text())).collect()
            }
            Self::Json(map) => {
                map.iter().flat_map(|(key, value)| texts(value).map(|text| (key.as_str(), text))).collect()
            }
        }
    }

    /// Replaces every value of a key by one, or adds it at the end.
    pub fn set(&mut self, key: &str, value: &str) {
        match self {
            Self::KeyValue(properties) => {
                // Where the first one was.
                let at = properties.iter().position(|property| property.key == key);
                properties.retain(|property| property.key != key);
                let new = Property { key: key.to_owned(), value: Some(value.to_owned()) };
                properties.insert(at.unwrap_or(properties.len()), new);
            }
            Self::Json(map) => {
                // JSON keeps types: a number or a boolean is written with the type of the former value.
                let typed = match map.get(key) {
                    Some(Value::Number(_)) => serde_json::from_str(value).ok().filter(Value::is_number),
                    Some(Value::Bool(_)) => match value {
                        "on" | "true" | "yes" => Some(Value::Bool(true)),
                        "off" | "false" | "no" => Some(Value::Bool(false)),
                        _ => None,
                    },
                    _ => None,
                };
                map.insert(key.to_owned(), typed.unwrap_or_else(|| Value::String(value.to_owned())));
            }
        }
    }

    /// As [`set`](Self::set), for a key whose value is a boolean.
    pub fn set_switch(&mut self, key: &str, is_on: bool) {
        match self {
            Self::KeyValue(_) => self.set(key, if is_on { "on" } else { "off" }),
            Self::Json(map) => drop(map.insert(key.to_owned(), Value::Bool(is_on))),
        }
    }

    /// Removes every value of a key.
    pub fn remove(&mut self, key: &str) {
        match self {
            Self::KeyValue(properties) => {
                properties.retain(|property| property.key != key);
                // A first word without a value would be the value of the implied key.
                if let Some(first) = properties.first_mut() {
                    first.value.get_or_insert_with(|| "on".to_owned());
                }
            }
            Self::Json(map) => drop(map.remove(key)),
        }
    }
}

/// A value that begins with `{` would be read as JSON, an empty one as no property.
fn can_stand_alone(value: &str) -> bool {
    !value.is_empty() && !value.contains(['=', ',']) && !value.starts_with('{')
}

/// The value at the beginning of `text`, unescaped, and its length there.
fn unescape(text: &str) -> (String, usize) {
    let mut value = String::new();
    let mut at = 0;
    loop {
        let end = text[at..].find(',').map_or(text.len(), |end| at + end);
        value.push_str(&text[at..end]);
        if !text[end..].starts_with(",,") {
            return (value, end);
        }
        value.push(',');
        at = end + 2;
    }
}

/// A key is written without an escape, so it must not contain what ends it.
fn check_key(key: &str) -> Result<(), ValueError> {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./+".contains(&byte);
    if key.is_empty() || key.len() > NAME_BYTES_MAX || !key.bytes().all(is_valid) {
        return Err(ValueError::Key { found: key.chars().take(NAME_BYTES_MAX).collect() });
    }
    Ok(())
}

/// The values of a key: one, or those of a list of numbers.
fn texts(value: &Value) -> impl Iterator<Item = String> + '_ {
    let values = match value {
        Value::Array(values) if !values.is_empty() && values.iter().all(Value::is_number) => {
            values.as_slice()
        }
        value => std::slice::from_ref(value),
    };
    values.iter().map(scalar_text)
}

fn scalar_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(true) => "on".to_owned(),
        Value::Bool(false) => "off".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Properties {
        Properties::parse(text, Some("type")).unwrap()
    }

    #[test]
    fn commas_are_escaped_by_commas() {
        let properties = parse("q35,path=/a,,b=c,,,on,last=");
        let wanted = [("type", "q35"), ("path", "/a,b=c,"), ("on", "on"), ("last", "")]
            .map(|(k, v)| (k, v.to_owned()));
        assert_eq!(properties.pairs(), wanted);
        assert_eq!(properties.to_text(Some("type")), "q35,path=/a,,b=c,,,on,last=");
    }

    #[test]
    fn implied_value_that_is_ambiguous_gets_its_key() {
        for value in ["a,b", "a=b", "", "{\"a\"}"] {
            let properties =
                Properties::KeyValue(vec![Property { key: "type".into(), value: Some(value.to_owned()) }]);
            let text = properties.to_text(Some("type"));
            assert_eq!(text, format!("type={}", value.replace(',', ",,")));
            assert_eq!(parse(&text), properties);
        }
    }

    #[test]
    fn last_value_of_a_key_counts() {
        assert_eq!(parse("memory-backend-ram,type=secret").value("type").unwrap(), "secret");
    }

    #[test]
    fn set_replaces_all_values_of_a_key() {
        let mut properties = parse("user,a=1,b=2,a=3");
        properties.set("a", "4,5");
        assert_eq!(properties.to_text(Some("type")), "user,a=4,,5,b=2");
        properties.set("c", "6");
        assert_eq!(properties.to_text(Some("type")), "user,a=4,,5,b=2,c=6");
    }

    #[test]
    fn a_key_alone_does_not_become_the_implied_value() {
        let mut properties = parse("user,restrict,ipv6");
        properties.remove("type");
        assert_eq!(properties.to_text(Some("type")), "restrict=on,ipv6");
        assert_eq!(parse("restrict=on,ipv6"), properties);
    }

    #[test]
    fn json_keeps_types() {
        let mut properties = Properties::parse_json(r#"{"driver":"e1000","mq":true,"vectors":4}"#).unwrap();
        properties.set("mq", "off");
        properties.set("vectors", "8");
        properties.set("mac", "52:54:00:00:00:01");
        let text = properties.to_text(Some("driver"));
        assert_eq!(text, r#"{"driver":"e1000","mac":"52:54:00:00:00:01","mq":false,"vectors":8}"#);
        assert_eq!(properties.value("mq").unwrap(), "off");
    }

    #[test]
    fn lists_of_numbers_are_several_values() {
        let properties = Properties::parse_json(r#"{"a":[0,1],"b":[],"c":["x"],"d":[1,[2]]}"#).unwrap();
        let wanted = [("a", "0"), ("a", "1"), ("b", "[]"), ("c", "[\"x\"]"), ("d", "[1,[2]]")];
        assert_eq!(properties.pairs(), wanted.map(|(key, value)| (key, value.to_owned())));
    }

    #[test]
    fn malformed_values_are_errors() {
        let fault = |text: &str| Properties::parse(text, Some("type")).unwrap_err();
        assert_eq!(fault("a,=b"), ValueError::Key { found: String::new() });
        assert_eq!(fault("a,b c=d"), ValueError::Key { found: "b c".into() });
        assert_eq!(fault("a,b=c,"), ValueError::TrailingComma);
        assert_eq!(fault(&"a=b,".repeat(300)), ValueError::TooManyProperties);
        assert!(matches!(Properties::parse_json("{\"a\":"), Err(ValueError::Json { .. })));
    }
}
