//! What is counted, as `query-stats` and metrics show it: subjects with labels, and numbers of each.
//!
//! ```text
//!   net-queue {tap=vm0, way=rx, queue=0}   packets 17, bytes 4242, …      QMP: qom-path /net-queue/vm0/rx/0
//! ```
//! What it is not: kept anywhere. Whoever counts makes these when somebody asks.

use serde_json::{Map, Value, json};
use towline_qmp::Refusal;

/// All kinds of subjects that there are anywhere.
const KINDS: [&str; 6] = ["migration", "migration-lane", "net", "net-queue", "vsock", "vsock-connection"];
/// What QEMU calls who counted; its own are `kvm` and `cryptodev`.
const PROVIDER: &str = "towline";

/// One subject, and its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatsObject {
    /// Its kind, in lower case with hyphens: one of `migration`, `migration-lane`, `net`, `net-queue`, `vsock`, `vsock-connection`.
    pub kind: &'static str,
    /// Which of its kind.
    pub labels: Vec<(&'static str, String)>,
    /// What was counted; the same names for each of a kind.
    pub metrics: Vec<Metric>,
}

/// One number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metric {
    /// In lower case with hyphens; bytes are called so at the end.
    pub name: &'static str,
    /// What it means, in one sentence without a full stop.
    pub help: &'static str,
    /// How it behaves.
    pub stats_type: StatsType,
    /// What it is counted in.
    pub unit: StatsUnit,
    /// How much.
    pub value: u64,
}

/// How a number behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatsType {
    /// It only grows.
    Cumulative,
    /// It is as it is at this moment.
    Instant,
}

/// What a number is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatsUnit {
    /// Things.
    Count,
    /// Bytes.
    Bytes,
    /// Milliseconds.
    Milliseconds,
}

impl Metric {
    /// Things that happened so far.
    pub fn counter(name: &'static str, help: &'static str, value: u64) -> Self {
        Self { name, help, stats_type: StatsType::Cumulative, unit: StatsUnit::Count, value }
    }

    /// Bytes so far.
    pub fn byte_counter(name: &'static str, help: &'static str, value: u64) -> Self {
        Self { name, help, stats_type: StatsType::Cumulative, unit: StatsUnit::Bytes, value }
    }

    /// How many there are now.
    pub fn gauge(name: &'static str, help: &'static str, value: u64) -> Self {
        Self { name, help, stats_type: StatsType::Instant, unit: StatsUnit::Count, value }
    }

    /// The same in bytes.
    #[must_use]
    pub fn in_bytes(self) -> Self {
        Self { unit: StatsUnit::Bytes, ..self }
    }

    /// The same in milliseconds.
    #[must_use]
    pub fn in_milliseconds(self) -> Self {
        Self { unit: StatsUnit::Milliseconds, ..self }
    }

    fn schema(&self) -> Value {
        let stats_type = match self.stats_type {
            StatsType::Cumulative => "cumulative",
            StatsType::Instant => "instant",
        };
        let mut schema = json!({ "name": self.name, "type": stats_type, "exponent": 0 });
        match self.unit {
            StatsUnit::Count => {}
            StatsUnit::Bytes => schema["unit"] = "bytes".into(),
            StatsUnit::Milliseconds => {
                (schema["unit"], schema["base"], schema["exponent"]) =
                    ("seconds".into(), 10.into(), (-3).into());
            }
        }
        schema
    }
}

impl StatsObject {
    fn path(&self) -> String {
        let labels = self.labels.iter().map(|(_, value)| value.as_str());
        std::iter::once("").chain([self.kind]).chain(labels).collect::<Vec<_>>().join("/")
    }
}

/// Who counts.
pub trait StatsSource: Send + Sync {
    /// All that is counted, at this moment.
    fn statistics(&self) -> Vec<StatsObject>;
}

/// `query-stats`: `target` is the kind (all, if it is left out), `providers` as in QEMU.
pub(crate) fn query(subjects: &[StatsObject], arguments: &Map<String, Value>) -> Result<Value, Refusal> {
    known(arguments, &["target", "providers"])?;
    let target = text(arguments, "target")?;
    if let Some(target) = target.filter(|target| !KINDS.contains(target)) {
        return Err(Refusal::because(format!("Parameter 'target' does not accept value '{target}'")));
    }
    let Some(names) = wanted(arguments)? else { return Ok(json!([])) };
    let is_wanted = |number: &&Metric| names.as_ref().is_none_or(|names| names.contains(&number.name));
    let one = |subject: &StatsObject| {
        let stats = subject.metrics.iter().filter(is_wanted);
        let stats: Value =
            stats.map(|number| json!({ "name": number.name, "value": number.value })).collect();
        json!({ "provider": PROVIDER, "qom-path": subject.path(), "stats": stats })
    };
    Ok(subjects
        .iter()
        .filter(|subject| target.is_none_or(|target| subject.kind == target))
        .map(one)
        .collect())
}

/// `query-stats-schemas`.
pub(crate) fn schemas(subjects: &[StatsObject], arguments: &Map<String, Value>) -> Result<Value, Refusal> {
    known(arguments, &["provider"])?;
    if text(arguments, "provider")?.is_some_and(|provider| provider != PROVIDER) {
        return Ok(json!([]));
    }
    let mut kinds: Vec<&StatsObject> = Vec::new();
    for subject in subjects {
        if kinds.iter().all(|kind| kind.kind != subject.kind) {
            kinds.push(subject);
        }
    }
    let schema = |subject: &&StatsObject| {
        let stats: Value = subject.metrics.iter().map(Metric::schema).collect();
        json!({ "provider": PROVIDER, "target": subject.kind, "stats": stats })
    };
    Ok(kinds.iter().map(schema).collect())
}

/// Refuses arguments that a command does not have.
pub(crate) fn known(arguments: &Map<String, Value>, names: &[&str]) -> Result<(), Refusal> {
    match arguments.keys().find(|key| !names.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => Err(Refusal::because(format!("Parameter '{key}' is unexpected"))),
    }
}

/// An argument that is text, if it is there.
pub(crate) fn text<'a>(arguments: &'a Map<String, Value>, name: &str) -> Result<Option<&'a str>, Refusal> {
    match arguments.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Refusal::because(format!("Invalid parameter type for '{name}', expected: string"))),
    }
}

/// Of `providers`: `None` if ours is not wanted, and the names that are, if not all.
#[allow(clippy::type_complexity, reason = "two questions with one answer each, used once")]
fn wanted(arguments: &Map<String, Value>) -> Result<Option<Option<Vec<&str>>>, Refusal> {
    let Some(providers) = arguments.get("providers") else { return Ok(Some(None)) };
    let wrong = || Refusal::because("Invalid parameter type for 'providers', expected: array");
    let ours = providers.as_array().ok_or_else(wrong)?.iter().find(|one| one["provider"] == PROVIDER);
    Ok(ours.map(|one| Some(one.get("names")?.as_array()?.iter().filter_map(Value::as_str).collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subjects() -> Vec<StatsObject> {
        let queue = |way: &str, packets| StatsObject {
            kind: "net-queue",
            labels: vec![("tap", "vm0".into()), ("way", way.into()), ("queue", "0".into())],
            metrics: vec![
                Metric::counter("packets", "frames", packets),
                Metric::byte_counter("bytes", "their bytes", 2 * packets),
                Metric::gauge("pending", "under way", 1),
            ],
        };
        vec![queue("rx", 3), queue("tx", 5)]
    }

    fn ask(arguments: &Value) -> Result<Value, Refusal> {
        query(&subjects(), arguments.as_object().unwrap())
    }

    #[test]
    fn they_are_in_qemus_shape() {
        let all = ask(&json!({})).unwrap();
        assert_eq!(all[1]["qom-path"], "/net-queue/vm0/tx/0");
        assert_eq!(all[1]["stats"][1], json!({ "name": "bytes", "value": 10 }));
        assert_eq!(all, ask(&json!({ "target": "net-queue" })).unwrap());
        let one = json!({ "providers": [{ "provider": "towline", "names": ["pending"] }] });
        let one = ask(&one).unwrap();
        assert_eq!(one[0]["stats"], json!([{ "name": "pending", "value": 1 }]));
        assert_eq!(ask(&json!({ "providers": [{ "provider": "kvm" }] })).unwrap(), json!([]));
        let schemas = schemas(&subjects(), &Map::new()).unwrap();
        assert_eq!(schemas.as_array().unwrap().len(), 1, "{schemas}");
        assert_eq!(
            schemas[0]["stats"][1],
            json!({ "name": "bytes", "type": "cumulative", "unit": "bytes", "exponent": 0 })
        );
    }

    #[test]
    fn what_there_is_not_is_refused() {
        for (arguments, text) in [
            (json!({ "target": "vm" }), "does not accept value 'vm'"),
            (json!({ "target": 1 }), "expected: string"),
            (json!({ "providers": 1 }), "expected: array"),
            (json!({ "vcpus": [] }), "'vcpus' is unexpected"),
        ] {
            let Err(Refusal::Because(found)) = ask(&arguments) else { panic!("not refused: {text}") };
            assert!(found.contains(text), "{found}");
        }
    }
}
