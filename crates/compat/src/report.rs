//! Findings of the rules, and the verdict that follows.

use std::fmt;

use schemars::JsonSchema;
use serde::Serialize;

use crate::limits;

/// Id of what another host has found.
const OTHER_HOST: &str = "other-host";

/// The party that makes the settings of both ends equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ConfiguredBy {
    /// `towline copy` or `move`, which set capabilities and parameters.
    Towline,
    /// QEMU's own `migrate`, with the present settings.
    ByHand,
}

/// Consequence of a finding for the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The guest runs on; this is worth knowing.
    Note,
    /// Unknown if the guest would run.
    Unknown,
    /// The guest would not run on.
    No,
}

/// Verdict on a guest and its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Yes.
    Yes,
    /// Yes, with notes.
    YesWithNotes,
    /// No.
    No,
    /// Unknown: a fact that decides it is missing.
    CouldNotTell,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Yes => "yes",
            Self::YesWithNotes => "yes, with notes",
            Self::No => "no",
            Self::CouldNotTell => "could not tell",
        })
    }
}

/// Something that a rule found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Finding {
    /// The rule's id.
    pub rule: &'static str,
    /// Severity of the finding.
    pub severity: Severity,
    /// Reading of the report to which it applies; `None`: both.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "ConfiguredBy")]
    pub configured_by: Option<ConfiguredBy>,
    /// Subject of the comparison, with both values.
    pub text: String,
    /// The remedy, or empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        if self.remedy.is_empty() { Ok(()) } else { write!(f, " ({})", self.remedy) }
    }
}

/// All that the rules found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    findings: Vec<Finding>,
}

impl Report {
    /// The verdict for one reading.
    pub fn verdict(&self, configured_by: ConfiguredBy) -> Verdict {
        match self.of(configured_by).map(|finding| finding.severity).max() {
            None => Verdict::Yes,
            Some(Severity::Note) => Verdict::YesWithNotes,
            Some(Severity::Unknown) => Verdict::CouldNotTell,
            Some(Severity::No) => Verdict::No,
        }
    }

    /// The findings of one reading, in the order of the rules.
    pub fn of(&self, configured_by: ConfiguredBy) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| finding.configured_by.is_none_or(|of| of == configured_by))
    }

    /// All findings.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Reasons against, for one reading, each with its remedy.
    pub fn reasons(&self, configured_by: ConfiguredBy) -> Vec<String> {
        let no = self.of(configured_by).filter(|finding| finding.severity == Severity::No);
        no.map(ToString::to_string).collect()
    }

    /// Notes, for one reading.
    pub fn notes(&self, configured_by: ConfiguredBy) -> Vec<String> {
        let rest = self.of(configured_by).filter(|finding| finding.severity != Severity::No);
        rest.map(ToString::to_string).collect()
    }

    /// Adds reasons against that the destination's host has given, unless this one has found them too.
    #[must_use]
    pub fn with_refusals(mut self, refusals: &[String]) -> Self {
        let known = self.reasons(ConfiguredBy::Towline);
        for text in refusals.iter().filter(|text| !known.contains(text)) {
            Findings { rule: OTHER_HOST, report: &mut self }.no(text.clone(), "");
        }
        self
    }

    /// Adds a finding of a rule that is not of two ends.
    #[must_use]
    pub fn with(mut self, finding: Finding) -> Self {
        self.push(finding);
        self
    }

    /// Keeps a finding within the limit; findings worse than a note are always kept.
    pub(crate) fn push(&mut self, finding: Finding) {
        if self.findings.len() >= limits::FINDINGS_MAX {
            let less = self.findings.iter().rposition(|kept| kept.severity < finding.severity);
            let Some(at) = less else { return };
            self.findings.remove(at);
        }
        self.findings.push(finding);
    }
}

/// A rule's own pen.
pub(crate) struct Findings<'a> {
    pub(crate) rule: &'static str,
    pub(crate) report: &'a mut Report,
}

impl Findings<'_> {
    pub(crate) fn no(&mut self, text: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::No, None, text.into(), remedy.into());
    }

    pub(crate) fn unknown(&mut self, text: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::Unknown, None, text.into(), remedy.into());
    }

    pub(crate) fn note(&mut self, text: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::Note, None, text.into(), remedy.into());
    }

    pub(crate) fn add(
        &mut self,
        severity: Severity,
        configured_by: Option<ConfiguredBy>,
        text: String,
        remedy: String,
    ) {
        self.report.push(Finding { rule: self.rule, severity, configured_by, text, remedy });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(severity: Severity, configured_by: Option<ConfiguredBy>) -> Report {
        let mut report = Report::default();
        Findings { rule: "r", report: &mut report }.add(severity, configured_by, "t".into(), String::new());
        report
    }

    #[test]
    fn the_worst_finding_decides() {
        assert_eq!(Report::default().verdict(ConfiguredBy::Towline), Verdict::Yes);
        assert_eq!(found(Severity::Note, None).verdict(ConfiguredBy::Towline), Verdict::YesWithNotes);
        let mut report = found(Severity::Unknown, None);
        assert_eq!(report.verdict(ConfiguredBy::ByHand), Verdict::CouldNotTell);
        Findings { rule: "r", report: &mut report }.no("x", "do y");
        assert_eq!(report.verdict(ConfiguredBy::ByHand), Verdict::No);
        assert_eq!(report.reasons(ConfiguredBy::ByHand), ["x (do y)"]);
        assert_eq!(report.notes(ConfiguredBy::ByHand), ["t"]);
    }

    #[test]
    fn a_finding_for_one_reading_is_not_reported_for_the_other() {
        let report = found(Severity::No, Some(ConfiguredBy::ByHand));
        assert_eq!(report.verdict(ConfiguredBy::ByHand), Verdict::No);
        assert_eq!(report.verdict(ConfiguredBy::Towline), Verdict::Yes);
    }

    #[test]
    fn too_many_notes_do_not_hide_a_no() {
        let mut report = Report::default();
        let mut findings = Findings { rule: "r", report: &mut report };
        (0..limits::FINDINGS_MAX + 5).for_each(|_| findings.note("n", ""));
        findings.no("x", "");
        assert_eq!(report.findings().len(), limits::FINDINGS_MAX);
        assert_eq!(report.verdict(ConfiguredBy::Towline), Verdict::No);
    }
}
