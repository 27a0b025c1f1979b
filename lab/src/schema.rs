//! Validation of events by `docs/schema/events.json`, with the part of JSON Schema that it uses.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::{Map, Value};

/// The schema of events.
#[derive(Debug)]
pub struct EventSchema(Value);

/// Keywords that the validation knows.
const KEYWORDS: [&str; 12] = [
    "$defs",
    "$ref",
    "$schema",
    "additionalProperties",
    "const",
    "description",
    "enum",
    "items",
    "oneOf",
    "properties",
    "required",
    "title",
];

impl EventSchema {
    /// Reads the schema of the checkout at `root`.
    ///
    /// # Errors
    /// The file cannot be read, or is not a list of events.
    pub fn load(root: &Path) -> Result<Self> {
        let path = root.join("docs/schema/events.json");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let schema: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        ensure!(schema["oneOf"].is_array(), "{}: expected events in `oneOf`", path.display());
        Ok(Self(schema))
    }

    /// Returns the titles of all events.
    pub fn titles(&self) -> Vec<&str> {
        self.events().filter_map(|event| event["title"].as_str()).collect()
    }

    /// Returns the title of an event's part of the schema.
    pub fn title(event: &Value) -> String {
        let name = event["event"].as_str().unwrap_or("(no event)");
        event["kind"].as_str().map_or_else(|| name.to_owned(), |kind| format!("{name}, {kind}"))
    }

    /// Validates an event.
    ///
    /// # Errors
    /// The property that differs, with both values.
    pub fn validate(&self, event: &Value) -> Result<()> {
        self.check(self.event(event)?, event, "event")
    }

    /// Returns the shape of an event: its identifiers unchanged and all other values replaced.
    ///
    /// # Errors
    /// The event is not in the schema.
    pub fn shape(&self, event: &Value) -> Result<Value> {
        Ok(self.shape_of(self.event(event)?, event))
    }

    fn events(&self) -> impl Iterator<Item = &Value> {
        self.0["oneOf"].as_array().into_iter().flatten()
    }

    fn event(&self, event: &Value) -> Result<&Value> {
        let title = Self::title(event);
        let found = self.events().find(|schema| schema["title"] == title.as_str());
        found.ok_or_else(|| anyhow!("unknown event {title}"))
    }

    fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let path = schema["$ref"].as_str();
        path.map_or(schema, |path| self.0.pointer(path.trim_start_matches('#')).unwrap_or(&Value::Null))
    }

    fn check(&self, schema: &Value, value: &Value, place: &str) -> Result<()> {
        let schema = self.resolve(schema);
        let Some(keywords) = schema.as_object() else { bail!("{place}: its schema is not an object") };
        for keyword in keywords.keys() {
            ensure!(keyword == "type" || KEYWORDS.contains(&keyword.as_str()), "{keyword} is not validated");
        }
        let fails = |expected: &Value| Err(anyhow!("{place}: found {value}, expected {expected}"));
        if let Some(one_of) = schema["oneOf"].as_array() {
            let matches = one_of.iter().filter(|schema| self.check(schema, value, place).is_ok()).count();
            return if matches == 1 { Ok(()) } else { fails(&schema["oneOf"]) };
        }
        if schema.get("const").is_some_and(|constant| constant != value) {
            return fails(&schema["const"]);
        }
        if schema["enum"].as_array().is_some_and(|values| !values.contains(value)) {
            return fails(&schema["enum"]);
        }
        let types = match &schema["type"] {
            Value::Array(types) => types.clone(),
            Value::Null => Vec::new(),
            one => vec![one.clone()],
        };
        if !types.is_empty() && !types.iter().any(|name| has_type(value, name)) {
            return fails(&schema["type"]);
        }
        match value {
            Value::Array(items) if schema["items"].is_object() => {
                items.iter().enumerate().try_for_each(|(index, item)| {
                    self.check(&schema["items"], item, &format!("{place}[{index}]"))
                })
            }
            Value::Object(fields) => self.check_fields(schema, fields, place),
            _ => Ok(()),
        }
    }

    fn check_fields(&self, schema: &Value, fields: &Map<String, Value>, place: &str) -> Result<()> {
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            ensure!(fields.contains_key(name), "{place} lacks {name}");
        }
        for (name, value) in fields {
            let place = format!("{place}.{name}");
            match (schema["properties"].get(name), &schema["additionalProperties"]) {
                (Some(schema), _) | (None, schema @ Value::Object(_)) => self.check(schema, value, &place)?,
                (None, Value::Bool(false)) => bail!("{place} is not in the schema"),
                (None, _) => {}
            }
        }
        Ok(())
    }

    fn shape_of(&self, schema: &Value, value: &Value) -> Value {
        let schema = self.resolve(schema);
        if schema.get("const").is_some() || schema.get("enum").is_some() {
            return value.clone();
        }
        if let Some(one_of) = schema["oneOf"].as_array() {
            let schema = one_of.iter().find(|schema| self.check(schema, value, "").is_ok());
            return self.shape_of(schema.unwrap_or(&Value::Null), value);
        }
        if let Some(types) = schema["type"].as_array() {
            // The value may be null in one run and not in the next.
            let names: Vec<&str> = types.iter().filter_map(Value::as_str).collect();
            return format!("({})", names.join(" or ")).into();
        }
        match value {
            Value::Null | Value::Bool(_) => value.clone(),
            Value::Number(_) | Value::String(_) => {
                format!("({})", schema["type"].as_str().unwrap_or_default()).into()
            }
            Value::Array(items) => {
                items.first().map(|item| self.shape_of(&schema["items"], item)).into_iter().collect()
            }
            Value::Object(fields) => {
                let fields = fields.iter().map(|(name, value)| {
                    let schema = schema["properties"].get(name).unwrap_or(&schema["additionalProperties"]);
                    (name.clone(), self.shape_of(schema, value))
                });
                Value::Object(fields.collect())
            }
        }
    }
}

fn has_type(value: &Value, name: &Value) -> bool {
    match name.as_str().unwrap_or_default() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}
