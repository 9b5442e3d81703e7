{{- define "weightsync.name" -}}
{{- if contains "weightsync" .Release.Name -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{- else -}}{{ printf "%s-weightsync" .Release.Name | trunc 50 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- define "weightsync.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "weightsync.name" .) }}
{{- end -}}

{{- define "weightsync.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "weightsync.labels" -}}
app.kubernetes.io/name: weightsync
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "weightsync.selector" -}}
app.kubernetes.io/name: weightsync
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: controller
{{- end -}}

{{/* What the controller may do with pods and objects of a watched namespace; each verb was proven to be needed. */}}
{{- define "weightsync.watchedRules" -}}
# Find trainer and rollout pods.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# launch: Ephemeral. A strategic patch with the pod's UID; the fence holds it to our image and to opted-in pods.
- apiGroups: [""]
  resources: [pods/ephemeralcontainers]
  verbs: [patch]
# The readiness gate weightsync.dev/ready of pods that declare it; the fence holds it to that condition.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
# Events are created, and repeats become a series by a patch.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [weightsync.dev]
  resources: [weightsyncs]
  verbs: [list, watch]
# Conditions, members, and the epoch (compare-and-swap by resourceVersion).
- apiGroups: [weightsync.dev]
  resources: [weightsyncs/status]
  verbs: [patch]
{{- end -}}
