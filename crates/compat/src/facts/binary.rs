//! A QEMU binary: the output of `qemu-system-x86_64 -machine TYPE -dump-vmstate FILE`, the state format of
//! each device.
//!
//! ```text
//! { "vmschkmachine": { "Name": "pc-q35-10.0" },
//!   "e1000": { "Name": "e1000", "version_id": 3, "minimum_version_id": 1,
//!              "Description": { "Fields": [ { "field": …, "version_id": …, "size": … } ], "Subsections": [ … ] } }, … }
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{Error, at_most};
use crate::limits;

/// The key by which a dump of a QEMU binary is known.
pub(super) const DUMP_KEY: &str = "vmschkmachine";

/// A QEMU binary, for one machine type.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct BinaryFacts {
    /// The machine type of the dump.
    pub machine: String,
    /// Device type to the description of its state.
    pub states: BTreeMap<String, StateFormat>,
}

/// Format of a device's state, or of a part of it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct StateFormat {
    /// The name in the stream.
    pub name: String,
    /// The version that it writes.
    pub version: u32,
    /// The oldest that it reads.
    pub version_min: u32,
    /// Fields, in order.
    pub fields: Vec<Field>,
    /// Parts that are there only if needed.
    pub subsections: Vec<StateFormat>,
}

/// A field.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Field {
    /// QEMU's name for it.
    pub name: String,
    /// The version of the state that brought it.
    pub version: u32,
    /// Size in bytes.
    pub size: u64,
    /// True if the device decides at run time about its presence.
    pub conditional: bool,
    /// Format of the structure, if the field is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub structure: Option<Box<StateFormat>>,
}

impl BinaryFacts {
    pub(super) fn of_dump(dump: &Value) -> Result<Self, Error> {
        let machine = dump[DUMP_KEY]["Name"].as_str().unwrap_or_default().to_owned();
        let types = dump.as_object().into_iter().flatten().filter(|(name, _)| *name != DUMP_KEY);
        let states = types.map(|(name, value)| {
            let mut state = state(&value["Description"], 0);
            state.name = text(value, "Name");
            state.version = u32_or_zero(value, "version_id");
            state.version_min = u32_or_zero(value, "minimum_version_id");
            (name.clone(), state)
        });
        let binary = Self { machine, states: states.collect() };
        binary.check()?;
        Ok(binary)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        at_most("device types", self.states.len(), limits::ENTRIES_MAX)
    }

    /// The description of a state by its name in the stream.
    pub fn state(&self, name: &str) -> Option<&StateFormat> {
        self.states.values().find(|state| state.name == name)
    }
}

fn state(value: &Value, depth: usize) -> StateFormat {
    if depth > limits::DEPTH_MAX {
        return StateFormat::default();
    }
    let list = |key: &str| value[key].as_array().map(Vec::as_slice).unwrap_or_default();
    let field = |field: &Value| Field {
        name: text(field, "field"),
        version: u32_or_zero(field, "version_id"),
        size: field["size"].as_u64().unwrap_or_default(),
        conditional: field["field_exists"].as_bool().unwrap_or_default(),
        structure: field.get("Description").map(|inner| Box::new(state(inner, depth + 1))),
    };
    StateFormat {
        name: text(value, "name"),
        version: u32_or_zero(value, "version_id"),
        version_min: u32_or_zero(value, "minimum_version_id"),
        fields: list("Fields").iter().map(field).collect(),
        subsections: list("Subsections").iter().map(|inner| state(inner, depth + 1)).collect(),
    }
}

fn text(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or_default().to_owned()
}

fn u32_or_zero(value: &Value, key: &str) -> u32 {
    value[key].as_u64().and_then(|number| u32::try_from(number).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use crate::{Facts, Subject};

    #[test]
    fn a_dump_is_read_as_it_is() {
        let text = r#"{ "vmschkmachine": { "Name": "pc-q35-10.0" },
            "e1000-82540em": { "Name": "e1000", "version_id": 3, "minimum_version_id": 1, "Description": {
              "name": "e1000", "version_id": 3, "minimum_version_id": 1,
              "Fields": [ { "field": "parent_obj", "version_id": 0, "field_exists": false, "size": 2576,
                "Description": { "name": "PCIDevice", "version_id": 2, "minimum_version_id": 1, "Fields": [] } } ],
              "Subsections": [ { "name": "e1000/tx_tso_state", "version_id": 1, "minimum_version_id": 1, "Fields": [] } ] } } }"#;
        let facts = Facts::parse(text.as_bytes()).unwrap();
        let Subject::Binary(binary) = &facts.subject else { panic!("{facts:?}") };
        assert_eq!(binary.machine, "pc-q35-10.0");
        let state = binary.state("e1000").unwrap();
        assert_eq!((state.version, state.version_min), (3, 1));
        assert_eq!(state.fields[0].size, 2576);
        assert_eq!(state.fields[0].structure.as_ref().unwrap().name, "PCIDevice");
        assert_eq!(state.subsections[0].name, "e1000/tx_tso_state");
        assert_eq!(Facts::parse(&facts.to_json()).unwrap(), facts);
    }
}
