//! CPUID features that were promised to the guest. QEMU accepts a destination with fewer features, and the
//! guest hangs or dies at the first missing instruction.

use super::Pair;
use crate::facts::FeatureWord;
use crate::report::Findings;

/// Bits of the processors' topology (`ht`, `cmp_legacy`), which `-smp` decides and not the model. QEMU 10.0
/// has them among its feature words, 7.2 adds them only when the guest reads them; the guest sees the same.
/// Leaf, register, bits.
const TOPOLOGY: [(u32, &str, u32); 2] = [(1, "EDX", 1 << 28), (0x8000_0001, "ECX", 1 << 1)];
/// Features that are named in one finding.
const NAMED_MAX: usize = 12;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    let (Some(guest), Some(there)) = (&source.cpu_features, &destination.cpu_features) else {
        findings
            .unknown("the processor features of one side are not known", "name a CPU model (-cpu) at both");
        return;
    };
    let (lost, gained) = (beyond(guest, there), beyond(there, guest));
    if !lost.is_empty() {
        let model = source.cpus.iter().flatten().next().map_or("the guest's", |cpu| cpu.model.as_str());
        findings.no(
            format!("the guest has processor features that are not there: {}", named(&lost)),
            // Their features depend on the version of QEMU and on the host.
            if ["host", "max"].contains(&model) {
                format!("-cpu {model} is another processor there: start both with a model that both have, such as Nehalem")
            } else {
                format!("start it with -cpu {model}, or both with a model that both hosts have")
            },
        );
    } else if !gained.is_empty() {
        findings.note(
            format!("processors there have features that the guest did not see so far: {}", named(&gained)),
            "it will see them after its next boot",
        );
    }
}

/// Bits of `a` that `b` does not have: leaf, subleaf, register, bit.
fn beyond(a: &[FeatureWord], b: &[FeatureWord]) -> Vec<String> {
    let of_b = |word: &FeatureWord| {
        let same = b.iter().find(|other| {
            (other.leaf, other.subleaf.unwrap_or(0), &other.register)
                == (word.leaf, word.subleaf.unwrap_or(0), &word.register)
        });
        same.map_or(0, |other| other.bits)
    };
    let bits = |word: &FeatureWord| {
        let topology = TOPOLOGY
            .iter()
            .find(|(leaf, register, _)| (*leaf, *register) == (word.leaf, word.register.as_str()));
        let missing = word.bits & !of_b(word) & !topology.map_or(0, |(_, _, bits)| *bits);
        (0..32).filter(move |bit| missing >> bit & 1 == 1).collect::<Vec<u32>>()
    };
    let names = |word: &FeatureWord| bits(word).into_iter().map(|bit| name(word, bit)).collect::<Vec<_>>();
    a.iter().flat_map(names).collect()
}

fn named(features: &[String]) -> String {
    let shown = features.iter().take(NAMED_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    match features.len().saturating_sub(NAMED_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// The feature's name, as `-cpu` and Linux have it.
fn name(word: &FeatureWord, bit: u32) -> String {
    let names = match (word.leaf, word.subleaf.unwrap_or(0), word.register.as_str()) {
        (1, _, "ECX") => LEAF_1_ECX,
        (1, _, "EDX") => LEAF_1_EDX,
        (7, 0, "EBX") => LEAF_7_EBX,
        (7, 0, "ECX") => LEAF_7_ECX,
        (0x8000_0001, _, "ECX") => EXTENDED_ECX,
        (0x8000_0001, _, "EDX") => EXTENDED_EDX,
        (13, 1, "EAX") => "xsaveopt xsavec xgetbv1 xsaves xfd",
        _ => "",
    };
    match names.split_whitespace().nth(bit as usize) {
        Some(name) if name != "-" => name.to_owned(),
        _ => {
            let FeatureWord { leaf, subleaf, register, .. } = word;
            format!("CPUID {leaf:#x}.{:#x} {register} bit {bit}", subleaf.unwrap_or(0))
        }
    }
}

// From bit 0 on; `-`: without a name. Intel SDM volume 2A (CPUID), AMD APM volume 3, appendix E.
const LEAF_1_ECX: &str = "pni pclmulqdq dtes64 monitor ds-cpl vmx smx est tm2 ssse3 cid - fma cx16 xtpr pdcm - pcid dca sse4.1 \
     sse4.2 x2apic movbe popcnt tsc-deadline aes xsave osxsave avx f16c rdrand hypervisor";
const LEAF_1_EDX: &str = "fpu vme de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 pn clflush - ds acpi mmx \
     fxsr sse sse2 ss ht tm ia64 pbe";
const LEAF_7_EBX: &str = "fsgsbase tsc-adjust sgx bmi1 hle avx2 - smep bmi2 erms invpcid rtm - - mpx - avx512f avx512dq rdseed \
     adx smap avx512ifma pcommit clflushopt clwb intel-pt avx512pf avx512er avx512cd sha-ni avx512bw avx512vl";
const LEAF_7_ECX: &str = "- avx512vbmi umip pku ospke waitpkg avx512vbmi2 - gfni vaes vpclmulqdq avx512vnni avx512bitalg - \
     avx512-vpopcntdq - la57 - - - - - rdpid - bus-lock-detect cldemote - movdiri movdir64b";
const EXTENDED_ECX: &str = "lahf_lm cmp_legacy svm extapic cr8legacy abm sse4a misalignsse 3dnowprefetch osvw ibs xop skinit \
     wdt - lwp fma4 tce - nodeid_msr - tbm topoext perfctr_core perfctr_nb";
const EXTENDED_EDX: &str = "fpu vme de pse tsc msr pae mce cx8 apic - syscall mtrr pge mca cmov pat pse36 - - nx - mmxext mmx \
     fxsr fxsr_opt pdpe1gb rdtscp - lm 3dnowext 3dnow";

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;
    use crate::report::Severity;

    fn words(leaf_1_ecx: u32, other: u32) -> Option<Vec<FeatureWord>> {
        let word = |leaf, subleaf, register: &str, bits| FeatureWord {
            leaf,
            subleaf,
            register: register.into(),
            bits,
        };
        Some(vec![word(1, None, "ECX", leaf_1_ecx), word(0x1234, Some(2), "EAX", other)])
    }

    #[test]
    fn a_feature_that_is_gone_is_named() {
        let found = between(run, |source, destination| {
            source.cpu_features = words(1 << 23 | 1 << 20 | 1, 1 << 4);
            destination.cpu_features = words(1, 0);
        });
        assert_eq!(found[0].severity, Severity::No);
        let text =
            "the guest has processor features that are not there: sse4.2, popcnt, CPUID 0x1234.0x2 EAX bit 4";
        assert_eq!(found[0].text, text);
    }

    /// 7.2 does not report `ht`, 10.0 does, and the guest sees it on both.
    #[test]
    fn topology_bits_are_not_features() {
        let edx = |bits| Some(vec![FeatureWord { leaf: 1, subleaf: None, register: "EDX".into(), bits }]);
        for (from, to) in [(1 << 28, 0), (0, 1 << 28)] {
            let found = between(run, |source, destination| {
                (source.cpu_features, destination.cpu_features) = (edx(from | 1), edx(to | 1));
            });
            assert_eq!(found.len(), 0, "{:?}", found.iter().map(|found| &found.text).collect::<Vec<_>>());
        }
    }

    #[test]
    fn one_more_is_a_note_and_the_same_is_nothing() {
        let severity = |there| {
            let found = between(run, |source, destination| {
                (source.cpu_features, destination.cpu_features) = (words(1, 0), there);
            });
            found.first().map(|found| found.severity)
        };
        assert_eq!(severity(words(1, 0)), None);
        assert_eq!(severity(words(3, 0)), Some(Severity::Note));
        assert_eq!(severity(None), Some(Severity::Unknown));
    }

    #[test]
    fn tables_end_where_the_register_does() {
        for (table, last) in [
            (LEAF_1_ECX, "hypervisor"),
            (LEAF_1_EDX, "pbe"),
            (LEAF_7_EBX, "avx512vl"),
            (EXTENDED_EDX, "3dnow"),
        ] {
            assert_eq!(table.split_whitespace().nth(31), Some(last));
        }
        assert_eq!(LEAF_7_ECX.split_whitespace().nth(28), Some("movdir64b"));
        assert_eq!(EXTENDED_ECX.split_whitespace().nth(22), Some("topoext"));
    }
}
