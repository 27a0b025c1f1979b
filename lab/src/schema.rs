//! Validation of events by `docs/schema/events.json`.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail};
use jsonschema::error::ValidationErrorKind;
use jsonschema::{ValidationError, Validator};
use serde_json::{Value, json};

/// The schema of events.
#[derive(Debug)]
pub struct EventSchema {
    pub(crate) schema: Value,
    validator: Validator,
}

impl EventSchema {
    /// Reads the schema of the checkout at `root`.
    ///
    /// # Errors
    /// The file cannot be read, or is not a schema.
    pub fn load(root: &Path) -> Result<Self> {
        let path = root.join("docs/schema/events.json");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let schema: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let validator = validator(&schema).with_context(|| path.display().to_string())?;
        Ok(Self { schema, validator })
    }

    /// Returns the titles of all events.
    pub fn titles(&self) -> BTreeSet<String> {
        let mut titles = BTreeSet::new();
        self.collect_titles(&self.schema, &json!({}), &mut titles);
        titles
    }

    /// Returns the title of an event: its name, and the kind of what it is about.
    pub fn title(event: &Value) -> String {
        let name = event["event"].as_str().unwrap_or("(no event)");
        event["kind"].as_str().map_or_else(|| name.to_owned(), |kind| format!("{name}, {kind}"))
    }

    /// Validates an event.
    ///
    /// # Errors
    /// The properties that differ, with their values.
    pub fn validate(&self, event: &Value) -> Result<()> {
        let errors: Vec<_> = self.validator.iter_errors(event).collect();
        if errors.is_empty() {
            return Ok(());
        }
        let title = Self::title(event);
        if !self.titles().contains(&title) {
            bail!("unknown event {title}");
        }
        // Where another property differs, all are unevaluated.
        let is_secondary = |error: &&ValidationError<'_>| {
            matches!(error.kind(), ValidationErrorKind::UnevaluatedProperties { .. })
        };
        let primary: Vec<_> = errors.iter().filter(|error| !is_secondary(error)).flat_map(causes).collect();
        let shown = if primary.is_empty() { errors.iter().flat_map(causes).collect() } else { primary };
        bail!("{}", shown.join("; "))
    }

    /// Adds the titles of the events in a part of the schema. `constants` are the properties that have one value there.
    fn collect_titles(&self, schema: &Value, constants: &Value, titles: &mut BTreeSet<String>) {
        let mut constants = constants.clone();
        for name in ["event", "kind"] {
            if let Some(constant) = schema["properties"][name].get("const") {
                constants[name] = constant.clone();
            }
        }
        let mut below = self.referenced(schema).into_iter().chain(alternatives(schema)).peekable();
        if below.peek().is_none() {
            titles.insert(Self::title(&constants));
        }
        below.for_each(|below| self.collect_titles(below, &constants, titles));
    }

    pub(crate) fn referenced(&self, schema: &Value) -> Option<&Value> {
        self.schema.pointer(schema["$ref"].as_str()?.strip_prefix('#')?)
    }
}

pub(crate) fn validator(schema: &Value) -> Result<Validator> {
    jsonschema::validator_for(schema).map_err(|error| anyhow!("{error}"))
}

pub(crate) fn alternatives(schema: &Value) -> impl Iterator<Item = &Value> {
    ["anyOf", "oneOf"].into_iter().filter_map(|name| schema[name].as_array()).flatten()
}

/// Returns the differences that an error consists of, except for those from other events.
fn causes(error: &ValidationError<'_>) -> Vec<String> {
    match error.kind() {
        ValidationErrorKind::AnyOf { context } | ValidationErrorKind::OneOfNotValid { context } => {
            let branches = context.iter().map(|branch| branch.iter().flat_map(causes).collect::<Vec<_>>());
            let is_other =
                |cause: &String| ["event.event:", "event.kind:"].iter().any(|key| cause.starts_with(key));
            branches.filter(|causes| !causes.iter().any(is_other)).flatten().collect()
        }
        _ => vec![format!("event{}: {error}", error.instance_path().as_str().replace('/', "."))],
    }
}
