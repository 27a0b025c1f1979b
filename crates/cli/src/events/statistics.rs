//! The counters of a network card.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use towline_net::{CopyReason, DropReason, Net, QueueStatistics};

use super::identifiers::Counters;
use crate::observability::counters;

objects! {
    #![serde(rename_all = "kebab-case")]

    /// Counters of each queue pair.
    Statistics(net: &Net) {
        tap: String = net.taps().name().to_owned(),
        pairs: Vec<Pair> = net
            .statistics()
            .iter()
            .zip(net.transmit_modes())
            .map(|(pair, mode)| Pair::new(pair, mode.name(), net.uses_xdp()))
            .collect(),
    }
}

objects! {
    #![serde(rename_all = "kebab-case", deny_unknown_fields)]

    /// A queue pair.
    Pair(pair: &[QueueStatistics; 2], mode: &'static str, uses_xdp: bool) {
        rx: Queue = Queue::new(&pair[0], None, None),
        tx: Queue = Queue::new(&pair[1], Some(mode), uses_xdp.then(|| copies(&pair[1]))),
    }

    /// Counters of a queue.
    Queue(queue: &QueueStatistics, mode: Option<&'static str>, copies: Option<Counters>) {
        #[serde(flatten)]
        #[schemars(schema_with = "names")]
        counters: Counters = counters(queue).into_iter().map(|counter| (counter.name.to_owned(), counter.value)).collect(),
        /// Counters by drop reason.
        drops: Counters = DropReason::ALL.map(|reason| (reason.name().to_owned(), queue.dropped(reason))).into(),
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "String", extend("enum" = ["tap", "af-xdp-copy", "af-xdp-zero-copy"]))]
        mode: Option<&'static str> = mode,
        /// With --af-xdp, transmitted frames that were copied, by reason.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "Counters")]
        copies: Option<Counters> = copies,
    }
}

fn copies(queue: &QueueStatistics) -> Counters {
    CopyReason::ALL.map(|reason| (reason.name().to_owned(), queue.copied_because(reason))).into()
}

/// Schema of the counters that have no reason.
fn names(_: &mut SchemaGenerator) -> Schema {
    let names = counters(&QueueStatistics::default()).into_iter().map(|counter| counter.name);
    let properties: serde_json::Map<_, _> =
        names.clone().map(|name| (name.to_owned(), json_schema!({ "type": "integer" }).into())).collect();
    json_schema!({ "type": "object", "properties": properties, "required": names.collect::<Vec<_>>() })
}
