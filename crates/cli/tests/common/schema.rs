//! Validation of events by `docs/schema/events.json`, with the part of JSON Schema that it uses.

use serde_json::{Map, Value};

/// The schema.
pub(crate) struct Schema(Value);

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

impl Schema {
    /// Reads the schema of this checkout.
    pub(crate) fn load() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/schema/events.json");
        Self(serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
    }

    /// Returns the titles of all events.
    pub(crate) fn titles(&self) -> Vec<&str> {
        self.0["oneOf"].as_array().unwrap().iter().map(|event| event["title"].as_str().unwrap()).collect()
    }

    /// Returns the title of an event's part of the schema.
    pub(crate) fn title(event: &Value) -> String {
        let name = event["event"].as_str().unwrap_or("(no event)");
        event["kind"].as_str().map_or_else(|| name.to_owned(), |kind| format!("{name}, {kind}"))
    }

    /// Validates an event.
    pub(crate) fn validate(&self, event: &Value) -> Result<(), String> {
        self.check(self.event(event)?, event, "event")
    }

    /// Returns an event with identifiers as they are and all other values replaced: its shape.
    pub(crate) fn shape(&self, event: &Value) -> Value {
        self.shape_of(self.event(event).unwrap(), event)
    }

    fn event(&self, event: &Value) -> Result<&Value, String> {
        let title = Self::title(event);
        let mut events = self.0["oneOf"].as_array().unwrap().iter();
        events.find(|schema| schema["title"] == title.as_str()).ok_or(format!("unknown event {title}"))
    }

    fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(path) => self.0.pointer(path.trim_start_matches('#')).expect(path),
            None => schema,
        }
    }

    fn check(&self, schema: &Value, value: &Value, place: &str) -> Result<(), String> {
        let schema = self.resolve(schema);
        for keyword in schema.as_object().unwrap().keys() {
            assert!(keyword == "type" || KEYWORDS.contains(&keyword.as_str()), "{keyword} is not validated");
        }
        let fails = |expected: &Value| Err(format!("{place}: found {value}, expected {expected}"));
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
        if !types.is_empty() && !types.iter().any(|name| has_type(value, name.as_str().unwrap())) {
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

    fn check_fields(&self, schema: &Value, fields: &Map<String, Value>, place: &str) -> Result<(), String> {
        for name in schema["required"].as_array().into_iter().flatten() {
            let name = name.as_str().unwrap();
            fields.get(name).ok_or_else(|| format!("{place} lacks {name}"))?;
        }
        for (name, value) in fields {
            let place = format!("{place}.{name}");
            match (schema["properties"].get(name), &schema["additionalProperties"]) {
                (Some(schema), _) | (None, schema @ Value::Object(_)) => self.check(schema, value, &place)?,
                (None, Value::Bool(false)) => return Err(format!("{place} is not in the schema")),
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
            let schema = one_of.iter().find(|schema| self.check(schema, value, "").is_ok()).unwrap();
            return self.shape_of(schema, value);
        }
        if let Some(types) = schema["type"].as_array() {
            // The value may be null in one run and not in the next.
            let names: Vec<&str> = types.iter().map(|name| name.as_str().unwrap()).collect();
            return format!("({})", names.join(" or ")).into();
        }
        match value {
            Value::Null | Value::Bool(_) => value.clone(),
            Value::Number(_) | Value::String(_) => format!("({})", schema["type"].as_str().unwrap()).into(),
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

fn has_type(value: &Value, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => panic!("unknown type {name}"),
    }
}
