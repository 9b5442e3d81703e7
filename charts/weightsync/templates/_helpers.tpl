{{/* The name of all objects, alone or with a suffix. */}}
{{- define "weightsync.name" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else -}}
{{- $name := .Values.nameOverride | default "weightsync" -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{- else -}}{{ printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "weightsync.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "weightsync.name" .) }}
{{- end -}}

{{- define "weightsync.image" -}}
{{- if and .Values.image.digest .Values.image.flavour -}}
{{- fail "image.digest names one image: give the digest of the flavour, and leave image.flavour empty" -}}
{{- else if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.flavour }}-{{ . }}{{ end }}
{{- end -}}
{{- end -}}

{{/* The plugin finds an installation by app.kubernetes.io/name, which therefore stays with nameOverride. */}}
{{- define "weightsync.labels" -}}
app.kubernetes.io/name: weightsync
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
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
# update.onWedged: RestartPod. With the pod's UID; the fence holds it to opted-in rollout pods.
- apiGroups: [""]
  resources: [pods]
  verbs: [delete]
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

{{/* The MutatingAdmissionPolicy API of this cluster; empty where it has none. */}}
{{- define "weightsync.injection.version" -}}
{{- if .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy" -}}admissionregistration.k8s.io/v1
{{- else if .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy" -}}admissionregistration.k8s.io/v1beta1
{{- else if semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version -}}admissionregistration.k8s.io/v1
{{- end -}}
{{- end -}}

{{/* How agents come into new pods: Policy, Webhook, or empty where injection is off. */}}
{{- define "weightsync.injection.method" -}}
{{- $served := include "weightsync.injection.version" . -}}
{{- if not .Values.injection.enabled -}}
{{- else if eq .Values.injection.method "Auto" -}}
{{ empty $served | ternary "Webhook" "Policy" }}
{{- else if and (eq .Values.injection.method "Policy") (not $served) -}}
{{- fail "injection.method is Policy, and the cluster serves no MutatingAdmissionPolicy: set it to Auto or Webhook (helm template: --kube-version and --api-versions describe the cluster)" -}}
{{- else -}}
{{ .Values.injection.method }}
{{- end -}}
{{- end -}}

{{/* JSON: what the controller's webhook adds beyond what the controller knows (WebhookSettings in src/controller/webhook.rs). */}}
{{- define "weightsync.injection.settings" -}}
{{- $settings := dict "resources" (dict) -}}
{{- range $kind := list "requests" "limits" -}}
{{- $amounts := dict -}}
{{- range $name, $amount := index $.Values.injection.resources $kind -}}{{- $_ := set $amounts $name (toString $amount) -}}{{- end -}}
{{- $_ := set $settings.resources $kind $amounts -}}
{{- end -}}
{{- with .Values.injection.sharedMemory.sizeLimit -}}{{- $_ := set $settings "sharedMemory" (toString .) -}}{{- end -}}
{{- $names := list -}}
{{- range .Values.injection.imagePullSecrets -}}{{- $names = append $names .name -}}{{- end -}}
{{- $_ := set $settings "imagePullSecrets" $names -}}
{{ toJson $settings }}
{{- end -}}

{{/* Pods that opt in by label, when they are created, in the namespaces that are watched. */}}
{{- define "weightsync.injection.constraints" -}}
matchConstraints:
  {{- with .Values.watchNamespaces }}
  namespaceSelector:
    matchExpressions:
    - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}
  {{- end }}
  objectSelector:
    matchExpressions:
    - {key: weightsync.dev/role, operator: In, values: [trainer, rollout]}
  resourceRules:
  - {apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}
{{- end -}}

{{/* CEL: the name of the engine's or trainer's container. */}}
{{- define "weightsync.injection.target" -}}
object.metadata.?annotations[?'weightsync.dev/container'].orValue(object.spec.containers[0].name)
{{- end -}}

{{/* CEL: how the agent is to come into the pod: sidecar (also `true`), wrap or false. */}}
{{- define "weightsync.injection.how" -}}
object.metadata.?annotations[?'weightsync.dev/inject'].orValue('sidecar')
{{- end -}}

{{/* CEL variables of both ways. */}}
{{- define "weightsync.injection.variables" -}}
- {name: target, expression: "{{ include "weightsync.injection.target" . }}"}
# Many engine pods mount their own /dev/shm: then that volume is shared, not replaced.
- name: shm
  expression: >-
    object.spec.containers.filter(c, c.name == variables.target).map(c, c.?volumeMounts.orValue([]))
    .map(ms, ms.filter(m, m.mountPath == '/dev/shm')).filter(ms, ms.size() > 0).map(ms, ms[0].name)
- {name: shmName, expression: "variables.shm.size() > 0 ? variables.shm[0] : 'weightsync-shm'"}
- {name: keySecret, expression: "object.metadata.?annotations[?'weightsync.dev/api-key-secret'].orValue('')"}
# An abstract socket ends at the pod's network namespace: only on a host's network would strangers reach it.
- name: users
  expression: "object.metadata.?annotations[?'weightsync.dev/trainer-uids'].orValue(object.spec.?hostNetwork.orValue(false) ? '' : 'any')"
- {name: serveUnclaimed, expression: "object.metadata.?annotations[?'weightsync.dev/serve-unclaimed-after-seconds'].orValue('')"}
- {name: ca, expression: "params.?data[?'ca.crt'].orValue('')"}
{{- end -}}

{{/* CEL: a JSON patch that adds the token's volume; first the shared memory's, unless the pod has its own; and Secrets for pulling the image. */}}
{{- define "weightsync.injection.volumes" -}}
{{- with .Values.injection.imagePullSecrets -}}
{{- $names := list -}}
{{- range . -}}{{- $names = append $names .name -}}{{- end -}}
(has(object.spec.imagePullSecrets) ? [] : [JSONPatch{op: "add", path: "/spec/imagePullSecrets", value: []}]) +
{{ toJson $names }}.filter(n, !object.spec.?imagePullSecrets.orValue([]).exists(s, s.?name.orValue('') == n))
  .map(n, JSONPatch{op: "add", path: "/spec/imagePullSecrets/-", value: Object.spec.imagePullSecrets{name: n}}) +
{{ end -}}
(has(object.spec.initContainers) ? [] : [JSONPatch{op: "add", path: "/spec/initContainers", value: []}]) +
(has(object.spec.volumes) ? [] : [JSONPatch{op: "add", path: "/spec/volumes", value: []}]) +
(variables.shm.size() > 0 ? [] : [JSONPatch{op: "add", path: "/spec/volumes/-", value: Object.spec.volumes{name: "weightsync-shm", emptyDir: Object.spec.volumes.emptyDir{medium: "Memory"{{ with .Values.injection.sharedMemory.sizeLimit }}, sizeLimit: {{ toString . | quote }}{{ end }}}}}]) +
[JSONPatch{op: "add", path: "/spec/volumes/-", value: Object.spec.volumes{name: "weightsync-token", projected: Object.spec.volumes.projected{sources: [
   Object.spec.volumes.projected.sources{serviceAccountToken: Object.spec.volumes.projected.sources.serviceAccountToken{audience: "weightsync.dev", expirationSeconds: 3600, path: "token"}}]}}}]
{{- end -}}

{{/* CEL: what a container of ours may use; empty where nothing is set. */}}
{{- define "weightsync.injection.resources" -}}
{{- $all := list -}}
{{- range $kind := list "requests" "limits" -}}
{{- with index $.Values.injection.resources $kind -}}
{{- $amounts := dict -}}
{{- range $name, $amount := . -}}{{- $_ := set $amounts $name (toString $amount) -}}{{- end -}}
{{- $all = append $all (printf "%s: %s" $kind (toJson $amounts)) -}}
{{- end -}}
{{- end -}}
{{- with $all -}}resources: Object.spec.initContainers.resources{ {{- join ", " . -}} },{{- end -}}
{{- end -}}

{{/* CEL: what `restricted` of Pod Security Standards wants of each container; a pod whose own context says user 0 has its agent as root. */}}
{{- define "weightsync.injection.confined" -}}
securityContext: Object.spec.initContainers.securityContext{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true,
  runAsNonRoot: object.spec.?securityContext.?runAsUser.orValue(1) != 0,
  capabilities: Object.spec.initContainers.securityContext.capabilities{drop: ["ALL"]}, seccompProfile: Object.spec.initContainers.securityContext.seccompProfile{type: "RuntimeDefault"}}
{{- end -}}

{{/* NetworkPolicyPeer: the namespaces that are watched. */}}
{{- define "weightsync.watchedNamespaces" -}}
{{- if .Values.watchNamespaces -}}
namespaceSelector: {matchExpressions: [{key: kubernetes.io/metadata.name, operator: In, values: {{ toJson .Values.watchNamespaces }}}]}
{{- else -}}
namespaceSelector: {}
{{- end -}}
{{- end -}}
