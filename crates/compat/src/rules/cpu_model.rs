//! The CPU model by its name.

use super::Pair;
use crate::report::Findings;

/// Models whose features depend on the host or on QEMU's version.
const HOST_MODELS: [&str; 2] = ["max", "host"];

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    let model = |qemu: &crate::facts::QemuFacts| {
        qemu.cpus.iter().flatten().next().map(|cpu| cpu.model.clone()).unwrap_or_default()
    };
    let (guest, there) = (model(source), model(destination));
    if guest != there {
        findings.note(
            format!("the CPU model is {guest:?} in the guest and {there:?} there"),
            format!(
                "family, model and caches differ for a guest that reads them: start it with -cpu {guest}"
            ),
        );
    } else if HOST_MODELS.contains(&guest.as_str()) && source.version != destination.version {
        findings.note(
            format!("-cpu {guest} is another processor with each QEMU and host"),
            "name a model (-cpu) for a guest that will be moved",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;
    use crate::facts::Cpu;

    #[test]
    fn another_name_is_noted_and_so_is_one_that_means_nothing() {
        let found = |there: &str, version: &str| {
            between(run, |source, destination| {
                let cpu = |model: &str| Some(vec![Cpu { model: model.into(), ..Cpu::default() }]);
                (source.cpus, destination.cpus) = (cpu("max"), cpu(there));
                destination.version = version.into();
            })
        };
        assert_eq!(found("max", "10.0.2"), []);
        assert!(found("max", "7.2.0")[0].text.starts_with("-cpu max is another processor"));
        assert!(found("Nehalem", "10.0.2")[0].text.contains("\"max\" in the guest and \"Nehalem\" there"));
    }
}
