{{/* The engine's own container: SGLang or vLLM, on the pod's loopback. */}}

{{/* Arguments. (dict "root" $ "model" $model) */}}
{{- define "rlctl.engineArgs" -}}
{{- $ports := include "rlctl.ports" .root | fromYaml -}}
{{- if eq .model.engine "sglang" -}}
- --model-path={{ .model.checkpoint.path }}
- --host=127.0.0.1
- --port={{ $ports.sglang }}
- --tp-size={{ .model.tensorParallel }}
- --admin-api-key=$(ADMIN_KEY)
{{- else -}}
- --model={{ .model.checkpoint.path }}
- --host=127.0.0.1
- --port={{ $ports.vllm }}
- --tensor-parallel-size={{ .model.tensorParallel }}
- --worker-extension-cls=rlctl_vllm.worker.extension.WorkerExtension
- --enable-scale-out
- --generation-config=vllm
- --return-tokens-as-token-ids
- --enable-prompt-tokens-details
- --logprobs-mode=processed_logprobs
{{- end }}
{{- with .model.engineArgs }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* GPUs and other resources of an engine. */}}
{{- define "rlctl.engineResources" -}}
{{- $resources := deepCopy (.resources | default dict) -}}
{{- $gpus := hasKey . "gpus" | ternary .gpus .tensorParallel | int -}}
{{- if $gpus -}}
{{- $limits := set ($resources.limits | default dict) (.gpuResource | default "nvidia.com/gpu") $gpus -}}
{{- $resources = set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "rlctl.engineMounts" -}}
- {name: shm, mountPath: /dev/shm}
- {name: checkpoint, mountPath: {{ .checkpoint.mountPath }}, readOnly: {{ hasKey .checkpoint "readOnly" | ternary .checkpoint.readOnly true }}}
{{- with .extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The container. It starts before the stage server and ends after it. (dict "root" $ "model" $model) */}}
{{- define "rlctl.engine" -}}
{{- $model := .model -}}
{{- $ports := include "rlctl.ports" .root | fromYaml -}}
{{- $port := index $ports $model.engine -}}
{{- $image := mergeOverwrite (deepCopy (index .root.Values.engineImages $model.engine)) ($model.image | default dict) -}}
- name: engine
  restartPolicy: Always
  image: {{ include "rlctl.image" (dict "image" $image) }}
  imagePullPolicy: {{ $image.pullPolicy }}
  command: [python3, -m, {{ eq $model.engine "sglang" | ternary "sglang.launch_server" "vllm.entrypoints.openai.api_server" }}]
  args: {{- include "rlctl.engineArgs" . | nindent 4 }}
  env:
    - {name: HOME, value: /tmp}
    - {name: USER, value: rlctl}
    {{- if eq $model.engine "sglang" }}
    - {name: ADMIN_KEY, valueFrom: {secretKeyRef: {name: {{ .root.Values.adminKey.secret }}, key: {{ .root.Values.adminKey.key }}}}}
    {{- else }}
    - {name: VLLM_SERVER_DEV_MODE, value: "1"}
    {{- end }}
    {{- with $model.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  # The engine listens on loopback only, where the kubelet does not reach it.
  startupProbe:
    exec:
      command:
        - python3
        - -c
        - import urllib.request; urllib.request.urlopen("http://127.0.0.1:{{ $port }}/health", timeout=4)
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: {{ div (int ($model.startSeconds | default 1800)) 10 }}
  # The data port is open while a stage server is attached. A new one cannot attach to an engine that an earlier one
  # has paused: such an engine starts again.
  livenessProbe: {tcpSocket: {port: {{ $ports.data }}}, periodSeconds: 30, failureThreshold: {{ div (int ($model.attachSeconds | default 900)) 30 }}}
  {{- with .root.Values.engineSecurityContext }}
  securityContext: {{- toYaml . | nindent 4 }}
  {{- end }}
  resources: {{- include "rlctl.engineResources" $model | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- include "rlctl.engineMounts" $model | nindent 4 }}
{{- end -}}
