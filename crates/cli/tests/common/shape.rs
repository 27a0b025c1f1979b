//! Shapes of events, which are the same in each run.

use serde_json::{Value, json};

use super::schema::{EventSchema, alternatives, validator};

impl EventSchema {
    /// Returns the shape of an event: its identifiers unchanged and all other values replaced.
    pub(crate) fn shape(&self, event: &Value) -> Value {
        self.shape_of(&self.schema, event)
    }

    /// Returns the parts of a schema that apply to a value.
    fn applied<'a>(&'a self, schema: &'a Value, value: &Value) -> Vec<&'a Value> {
        let is_met = |alternative: &&Value| {
            let schema = json!({ "$defs": self.schema["$defs"], "allOf": [alternative] });
            validator(&schema).unwrap().is_valid(value)
        };
        let below = self.referenced(schema).into_iter().chain(alternatives(schema).filter(is_met));
        [schema].into_iter().chain(below.flat_map(|below| self.applied(below, value))).collect()
    }

    fn shape_of(&self, schema: &Value, value: &Value) -> Value {
        let schemas = self.applied(schema, value);
        if schemas.iter().any(|schema| schema.get("const").or(schema.get("enum")).is_some()) {
            return value.clone();
        }
        let keyword = |name: &str| schemas.iter().find_map(|schema| schema.get(name)).unwrap_or(&Value::Null);
        let is_scalar = !value.is_array() && !value.is_object();
        if let Some(types) = keyword("type").as_array().filter(|_| is_scalar) {
            // The value may be null in one run and not in the next.
            let names: Vec<&str> = types.iter().filter_map(Value::as_str).collect();
            return format!("({})", names.join(" or ")).into();
        }
        match value {
            Value::Null | Value::Bool(_) => value.clone(),
            Value::Number(_) | Value::String(_) => {
                format!("({})", keyword("type").as_str().unwrap_or_default()).into()
            }
            Value::Array(items) => {
                items.iter().take(1).map(|item| self.shape_of(keyword("items"), item)).collect()
            }
            Value::Object(fields) => {
                let shape = |(name, value): (&String, &Value)| {
                    let property = schemas.iter().find_map(|schema| schema["properties"].get(name));
                    let schema = property.unwrap_or(keyword("additionalProperties"));
                    (name.clone(), self.shape_of(schema, value))
                };
                fields.iter().map(shape).collect()
            }
        }
    }
}
