//! Statistics as `query-stats` and metrics show them: objects with labels, and the metrics of each.
//!
//! ```text
//!   net-queue {tap=vm0, way=rx, queue=0}   packets 17, bytes 4242, …      QMP: qom-path /net-queue/vm0/rx/0
//! ```
//! Out of scope: storage. Sources build these objects for each query.

use serde_json::{Map, Value, json};
use towline_qmp::CommandError;

/// All kinds of objects.
const KINDS: [&str; 7] =
    ["migration", "migration-lane", "net", "net-queue", "protection", "vsock", "vsock-connection"];
/// Name of the provider; QEMU's own are `kvm` and `cryptodev`.
const PROVIDER: &str = "towline";

/// An object, and its metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatsObject {
    /// Kind, in lower case with hyphens: one of `migration`, `migration-lane`, `net`, `net-queue`, `protection`, `vsock`,
    /// `vsock-connection`.
    pub kind: &'static str,
    /// Labels that identify it among its kind.
    pub labels: Vec<(&'static str, String)>,
    /// Metrics; each object of a kind has the same names.
    pub metrics: Vec<Metric>,
}

/// A metric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metric {
    /// Name, in lower case with hyphens; it ends in `bytes` if it counts bytes.
    pub name: &'static str,
    /// Description in one sentence without a full stop.
    pub help: &'static str,
    /// Type.
    pub stats_type: StatsType,
    /// Unit.
    pub unit: StatsUnit,
    /// Value.
    pub value: u64,
}

/// Type of a metric, as in QAPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatsType {
    /// A value that only increases.
    Cumulative,
    /// The present value.
    Instant,
}

/// Unit of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatsUnit {
    /// No unit.
    Count,
    /// Bytes.
    Bytes,
    /// Milliseconds.
    Milliseconds,
}

impl Metric {
    /// A counter of events.
    pub fn counter(name: &'static str, help: &'static str, value: u64) -> Self {
        Self { name, help, stats_type: StatsType::Cumulative, unit: StatsUnit::Count, value }
    }

    /// A counter of bytes.
    pub fn byte_counter(name: &'static str, help: &'static str, value: u64) -> Self {
        Self { name, help, stats_type: StatsType::Cumulative, unit: StatsUnit::Bytes, value }
    }

    /// A current value.
    pub fn gauge(name: &'static str, help: &'static str, value: u64) -> Self {
        Self { name, help, stats_type: StatsType::Instant, unit: StatsUnit::Count, value }
    }

    /// The same metric in bytes.
    pub fn in_bytes(self) -> Self {
        Self { unit: StatsUnit::Bytes, ..self }
    }

    /// The same metric in milliseconds.
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

/// A source of statistics.
pub trait StatsSource: Send + Sync {
    /// All objects with their current values.
    fn statistics(&self) -> Vec<StatsObject>;
}

/// Executes `query-stats`: `target` is the kind (all if it is absent), `providers` as in QEMU.
pub(crate) fn query(objects: &[StatsObject], arguments: &Map<String, Value>) -> Result<Value, CommandError> {
    check_names(arguments, &["target", "providers"])?;
    let target = text_argument(arguments, "target")?;
    if let Some(target) = target.filter(|target| !KINDS.contains(target)) {
        return Err(CommandError::generic(format!("Parameter 'target' does not accept value '{target}'")));
    }
    let Some(names) = selected_names(arguments)? else { return Ok(json!([])) };
    let is_selected = |metric: &&Metric| names.as_ref().is_none_or(|names| names.contains(&metric.name));
    let one = |object: &StatsObject| {
        let stats = object.metrics.iter().filter(is_selected);
        let stats: Value =
            stats.map(|metric| json!({ "name": metric.name, "value": metric.value })).collect();
        json!({ "provider": PROVIDER, "qom-path": object.path(), "stats": stats })
    };
    Ok(objects.iter().filter(|object| target.is_none_or(|target| object.kind == target)).map(one).collect())
}

/// The first object of each kind, whose metrics all objects of that kind have.
pub fn one_of_each_kind(objects: &[StatsObject]) -> Vec<&StatsObject> {
    let mut kinds: Vec<&StatsObject> = Vec::new();
    for object in objects {
        if kinds.iter().all(|kind| kind.kind != object.kind) {
            kinds.push(object);
        }
    }
    kinds
}

/// Executes `query-stats-schemas`.
pub(crate) fn schemas(
    objects: &[StatsObject],
    arguments: &Map<String, Value>,
) -> Result<Value, CommandError> {
    check_names(arguments, &["provider"])?;
    if text_argument(arguments, "provider")?.is_some_and(|provider| provider != PROVIDER) {
        return Ok(json!([]));
    }
    let schema = |object: &StatsObject| {
        let stats: Value = object.metrics.iter().map(Metric::schema).collect();
        json!({ "provider": PROVIDER, "target": object.kind, "stats": stats })
    };
    Ok(one_of_each_kind(objects).into_iter().map(schema).collect())
}

/// Refuses arguments that a command does not have.
pub(crate) fn check_names(arguments: &Map<String, Value>, names: &[&str]) -> Result<(), CommandError> {
    match arguments.keys().find(|key| !names.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => Err(CommandError::generic(format!("Parameter '{key}' is unexpected"))),
    }
}

/// A text argument, if it is present.
pub(crate) fn text_argument<'a>(
    arguments: &'a Map<String, Value>,
    name: &str,
) -> Result<Option<&'a str>, CommandError> {
    match arguments.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => {
            Err(CommandError::generic(format!("Invalid parameter type for '{name}', expected: string")))
        }
    }
}

/// Names in `providers`: `None` if our provider is not among them, `Some(None)` for all metrics.
#[allow(clippy::type_complexity, reason = "the provider and its names are both optional")]
fn selected_names(arguments: &Map<String, Value>) -> Result<Option<Option<Vec<&str>>>, CommandError> {
    let Some(providers) = arguments.get("providers") else { return Ok(Some(None)) };
    let wrong = || CommandError::generic("Invalid parameter type for 'providers', expected: array");
    let ours = providers.as_array().ok_or_else(wrong)?.iter().find(|one| one["provider"] == PROVIDER);
    Ok(ours.map(|one| Some(one.get("names")?.as_array()?.iter().filter_map(Value::as_str).collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objects() -> Vec<StatsObject> {
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

    fn execute(arguments: &Value) -> Result<Value, CommandError> {
        query(&objects(), arguments.as_object().unwrap())
    }

    #[test]
    fn statistics_have_qemus_format() {
        let all = execute(&json!({})).unwrap();
        assert_eq!(all[1]["qom-path"], "/net-queue/vm0/tx/0");
        assert_eq!(all[1]["stats"][1], json!({ "name": "bytes", "value": 10 }));
        assert_eq!(all, execute(&json!({ "target": "net-queue" })).unwrap());
        let one = json!({ "providers": [{ "provider": "towline", "names": ["pending"] }] });
        let one = execute(&one).unwrap();
        assert_eq!(one[0]["stats"], json!([{ "name": "pending", "value": 1 }]));
        assert_eq!(execute(&json!({ "providers": [{ "provider": "kvm" }] })).unwrap(), json!([]));
        let schemas = schemas(&objects(), &Map::new()).unwrap();
        assert_eq!(schemas.as_array().unwrap().len(), 1, "{schemas}");
        assert_eq!(
            schemas[0]["stats"][1],
            json!({ "name": "bytes", "type": "cumulative", "unit": "bytes", "exponent": 0 })
        );
    }

    #[test]
    fn unknown_arguments_are_refused() {
        for (arguments, text) in [
            (json!({ "target": "vm" }), "does not accept value 'vm'"),
            (json!({ "target": 1 }), "expected: string"),
            (json!({ "providers": 1 }), "expected: array"),
            (json!({ "vcpus": [] }), "'vcpus' is unexpected"),
        ] {
            let Err(CommandError::Generic(found)) = execute(&arguments) else {
                panic!("not refused: {text}")
            };
            assert!(found.contains(text), "{found}");
        }
    }
}
